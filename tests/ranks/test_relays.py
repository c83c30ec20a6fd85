"""Messages that are relayed on gloo: the same bits as straight ones, and every rank names the one
that dies."""

import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from tests.support.faults import SILENCE, answers, connect, launch
from tests.unit.comm.routing.test_relays import PAIRS, routed
from tests.unit.comm.test_nccl_rules import LAYOUTS, call, once

RANKS = 4


def both(group, case):
    """Whether routed calls have the bits of a straight one: the first, and one that knows what to
    relay; under inference mode too."""
    expected, found = once(group, case), []
    for _ in range(2):
        found += [once(group, routed(case))]
    return [torch.equal(x, y) for each in found for x, y in zip(each, expected, strict=True)]


@pytest.mark.parametrize(
    "strategy", ["ring", "disaggregated+at random", "usp+mesh", "lasp2 all_gather"]
)
def test_strategies_have_the_same_bits(pool, strategy):
    """The unit test has all of them, on virtual ranks."""
    for layout in ("zigzag", "two ranks of four"):
        for found in pool(RANKS, both, call(strategy, LAYOUTS[layout])):
            assert all(found) and found


def layers(group, count):
    """A model's layers, forward and then backward, where relays of one pass and messages of the
    next are under way at once."""
    layout = Layout.zigzag([0, 40, 640], RANKS)
    leaves = [torch.randn(1, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    grads = []
    for routing in (None, PAIRS):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(640, 4, 8, generator=generator)
        x = layout.shard(x, dist.get_rank(group)).requires_grad_()
        attn = [
            seqpar.make_attention(name, group, routing=routing)
            for name in ("all_gather", "token_ring", "ring", "ulysses")
        ]
        y = x
        for i in range(count):
            y = attn[i % 4](y * leaves[i], y, y, layout, causal=True)
        y.square().sum().backward()
        grads.append([y.detach(), x.grad])
    with torch.inference_mode():
        y = attn[0](x.detach(), x.detach(), x.detach(), layout, causal=True)
    assert y.isfinite().all()
    return [torch.equal(a, b) for a, b in zip(*grads, strict=True)]


def test_layers_may_overlap(pool):
    assert pool(RANKS, layers, 8) == [[True, True]] * RANKS


def flights(group, case):
    """What a trace shows of exchanges."""
    found = []
    for each in (case, routed(case)):
        with seqpar.trace() as recorded:
            once(group, each)
        kinds = [x for x in recorded.events if x.kind in ("flight", "wait")]
        found.append(sorted((x.kind, x.what, x.step, x.bytes, x.peers) for x in kinds))
    return found


def test_a_trace_shows_exchanges_and_not_their_hops(pool):
    for straight, relayed in pool(RANKS, flights, call("ring", LAYOUTS["zigzag"])):
        assert straight and straight == relayed


def disagreeing(group, check_ranks):
    """What a call raises where rank 2 has no routing."""
    routing = None if dist.get_rank(group) == 2 else PAIRS
    attn = seqpar.RingAttention(group, check_ranks, routing=routing)
    q = torch.randn(16, 2, 8)
    with pytest.raises((ValueError, seqpar.PeerError)) as caught:
        attn(q, q, q, Layout.contiguous(64, RANKS), causal=True)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("check_ranks", "error", "text"),
    [
        (True, "ValueError", "routing must be the same on all ranks: rank 0 has Routing.node_size"),
        pytest.param(
            False,
            "PeerError",
            "rank [23] is in call .*, step 1 of ring forward.*, while rank [23] is .*routing must",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_ranks_that_route_otherwise_raise_the_same_error(pool, check_ranks, error, text):
    answers = pool.each(RANKS, disagreeing, check_ranks)
    if not check_ranks:
        pool.restart()  # after a PeerError the group cannot be used
    for kind, (found, said) in answers:
        assert (kind, found) == ("result", error) and re.match(text, said)


def attend(rank, ranks, address, pipe, who, label):
    """Calls, in one of which a rank dies, at an exchange in which it only relays."""
    torch.set_num_threads(1)
    connect(rank, ranks, address)
    attn = seqpar.RingAttention(dist.group.WORLD, routing=PAIRS)
    exchange = Comm.exchange
    layout = Layout.from_spans([[(0, 0, 64)], [], [(0, 64, 128)], []], 128)

    def faulty(comm, *messages, **named):
        if (rank, named["label"]) == (who, label):
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(comm, *messages, **named)

    dist.barrier()
    tokens = layout.tokens_on(rank)
    q, k, v = (torch.randn(tokens, 2, 4, requires_grad=True) for _ in range(3))
    attn(q, k, v, layout, causal=True).sum().backward()  # they know what to relay now
    Comm.exchange = faulty
    start = time.monotonic()
    try:
        attn(q, k, v, layout, causal=True).sum().backward()
        pipe.send(("", 0.0))
    except seqpar.PeerError as error:
        pipe.send((str(error), time.monotonic() - start))
        time.sleep(rank * SILENCE / 3)
    sys.exit(0)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("who", "label"),
    [(1, "ring backward"), pytest.param(3, "ring forward", marks=pytest.mark.exhaustive)],
)
def test_a_dead_relay_is_named_by_its_users(tmp_path, who, label):
    others = [rank for rank in range(RANKS) if rank != who]
    said = answers(*launch(attend, RANKS, f"{tmp_path}/store", who, label), others)
    for error, _ in said.values():
        assert error.startswith(f"rank {who} died"), said
