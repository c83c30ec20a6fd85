"""Messages that are relayed: the same bits as straight ones, on virtual ranks and under NCCL's
rules, and asked about once."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import LASP2Attention, Layout, RingAttention, Routing
from seqpar.comm.routing.relays import Relays
from seqpar.strategies.registry import SOFTMAX
from tests.support.cases import STRATEGIES, VARIANTS, cu_seqlens, layouts
from tests.support.fakes import fake_group
from tests.support.nccl import nccl
from tests.support.nccl_exchanges import Speeds
from tests.support.ranks import virtual
from tests.support.tiers import examples, few_rows
from tests.unit.comm.test_nccl_rules import LAYOUTS, assert_same, call, once

CPU = torch.device("cpu")
PAIRS = Routing(node_size=2, least_bytes=1)
CROSSED = Routing(nodes=[0, 1, 0, 1], least_bytes=1)
SAME_EXCHANGES = [name for name in STRATEGIES if SOFTMAX[name].strategy.routable]
ROUTABLE = [*SAME_EXCHANGES, *VARIANTS, "lasp2 all_gather"]


def routed(case, routing=PAIRS):
    return dataclasses.replace(case, module_options=(("routing", routing),))


def twice(comm, case):
    """Two calls: of the second one, ranks know what to relay."""
    return once(comm, case), once(comm, case)


def assert_as_without(case, routing, ranks=4, **rules):
    """Hold routed calls, as threads and under NCCL's rules, to the bits of straight ones."""
    expected = virtual(ranks, once, case)
    case = routed(case, routing)
    for found in (virtual(ranks, twice, case), nccl(ranks, twice, case, **rules)[0]):
        for calls, bits in zip(found, expected, strict=True):
            for each in calls:
                assert_same(each, bits)


@few_rows(pairs=False)
@pytest.mark.parametrize("strategy", ROUTABLE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("routing", ["pairs", "crossed"])
def test_every_strategy_and_layout_has_the_same_bits(strategy, layout, crowded, causal, routing):
    case = call(strategy, LAYOUTS[layout], causal)
    routing = {"pairs": PAIRS, "crossed": CROSSED}[routing]
    assert_as_without(case, routing, one_at_a_time=crowded)


@examples(5, 15)
@given(st.data())
def test_any_layout_has_the_same_bits(data):
    ranks, size = data.draw(st.sampled_from([(4, 2), (4, 4), (6, 2), (6, 3), (8, 4)]))
    cu = data.draw(cu_seqlens(40))
    case = call(data.draw(st.sampled_from(ROUTABLE)), data.draw(layouts(cu, ranks)))
    nics = data.draw(st.sampled_from([x for x in (1, 2, 3, 4) if size % x == 0]))
    least, chunk = data.draw(st.sampled_from([(1, 32), (300, 64), (1, 2**22)]))
    routing = Routing(size, None, nics, least_bytes=least, chunk_bytes=chunk)
    assert_as_without(case, routing, ranks, one_at_a_time=data.draw(st.booleans()))


def bytes_and_messages(comm, case):
    """How much each of two calls sent, in forward and backward together."""
    sent = [(comm.sent_bytes, comm.sent_messages)]
    for _ in range(2):
        once(comm, case)
        sent.append((comm.sent_bytes, comm.sent_messages))
    return [(b - a, d - c) for (a, c), (b, d) in itertools.pairwise(sent)]


def one_message(comm, size, routing):
    """What each rank sends while rank 0 sends rank 3 a message of so many bytes, in a second pass;
    and what arrives."""
    relays = Relays.of(comm, routing)
    for _ in range(2):
        before = comm.sent_bytes
        of_pass = relays.in_pass(comm.call(), CPU, "test")
        message = torch.arange(size) % 251 if comm.rank == 0 else torch.zeros(size)
        message = message.to(torch.uint8)
        ends = {0: ([(3, message)], []), 3: ([], [(0, message)])}.get(comm.rank, ([], []))
        of_pass.exchange(*ends, label="test").wait()
    return comm.sent_bytes - before, message


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 4096])
def test_halves_of_a_message_use_different_proxies(size):
    sent = virtual(4, one_message, size, PAIRS)
    assert torch.equal(sent[3][1], (torch.arange(size) % 251).to(torch.uint8))
    half = min(size, -(-size // 32) * 16)  # to rank 2, which passes it on
    straight = [size, 0, 0, 0]  # where there are not two pieces of 16 bytes
    assert [count for count, _ in sent] == (
        [size, size - half, half, 0] if half < size else straight
    )


def test_short_messages_go_straight():
    sent = virtual(4, one_message, 1000, dataclasses.replace(PAIRS, least_bytes=1001))
    assert [count for count, _ in sent] == [1000, 0, 0, 0]


def test_what_is_relayed_is_asked_once():
    """The first call of a layout asks the node's other rank: two messages in each exchange."""
    case = call("ring", Layout.zigzag([0, 64], 4), sinks=False)
    straight = virtual(4, bytes_and_messages, case)
    for (first, second), (plain, _) in zip(
        virtual(4, bytes_and_messages, routed(case)), straight, strict=True
    ):
        assert first[1] == second[1] + 2 * (3 + 6)  # exchanges: 3 forward, 6 backward
        assert second[0] > plain[0]  # what it relays


def test_what_cannot_be_routed_is_refused():
    with fake_group(rank=0, ranks=4) as group:
        for wrong, options in (
            ("node_size must divide the group's 4 ranks, got 3", {"routing": Routing(3)}),
            ("nodes must have one entry per rank, 4, got 2", {"routing": Routing(nodes=[0, 1])}),
            ("nodes must have equal numbers", {"routing": Routing(nodes=[0, 0, 0, 1])}),
            ("nics must divide the 2 ranks", {"routing": Routing(2, nics=3)}),
            ("routing must be a seqpar.Routing", {"routing": 2}),
        ):
            for make in (RingAttention, LASP2Attention):
                with pytest.raises(ValueError, match=wrong):
                    make(group, **options)
        with pytest.raises(ValueError, match="routing must be None for 'zeco'"):
            LASP2Attention(group, transport="scan", routing=PAIRS)


def compute_meanwhile(comm, compute):
    """Send a message from rank 0 to rank 2, and compute before it is waited for; how long that
    takes once ranks know what to relay."""
    relays = Relays.of(comm, PAIRS)
    for seconds in (0.0, compute):
        of_pass, begun = relays.in_pass(comm.call(), CPU, "test"), comm.world.now[comm.rank]
        message = torch.ones(1 << 10, dtype=torch.uint8)
        ends = {0: ([(2, message)], []), 2: ([], [(0, message)])}.get(comm.rank, ([], []))
        pending = of_pass.exchange(*ends, label="test")
        comm.work(seconds)
        pending.wait()
    return comm.world.now[comm.rank] - begun


@pytest.mark.parametrize(("compute", "expected"), [(0.0, 3.0), (50.0, 50.0)])
def test_on_nccl_hops_run_async_compute(compute, expected):
    """Each of three hops takes a second; ranks that compute relay meanwhile."""
    seconds, _ = nccl(4, compute_meanwhile, compute, speeds=Speeds(latency=1.0))
    assert max(seconds) == expected


def test_calls_on_cpus_and_gpus_share_no_routes():
    """Their results may travel in different dtypes."""
    with fake_group(0, 4) as group:
        bound = RingAttention(group, routing=PAIRS)._bound
        known = [
            bound.routed(bound.comm.call(), torch.device(x), "forward", {})._router.__self__._known
            for x in ("cpu", "cuda", "cpu")
        ]
    assert known[0] is known[2] and known[0] is not known[1]
