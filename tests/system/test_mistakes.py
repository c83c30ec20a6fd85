"""What all ranks see when rank 1 makes other calls than they, or ends. Real processes, a group of
their own for each test, which end as interpreters do."""

import ctypes
import itertools
import re
import time

import pytest
import torch
import torch.distributed as dist

import seqpar
from tests.support.cases import STRATEGIES, module
from tests.support.faults import TIMEOUT, connect, launch
from tests.support.recurrent_calls import gated_delta

pytestmark = pytest.mark.alone

SOON = TIMEOUT / 2
ALL = [*STRATEGIES, "lasp2", "lasp2 scan", "recurrent", "recurrent tree"]
CALL = r"call \d+, step \d+ of (\w+ (for|back)ward(, \w+)?|rank check)"
IN_TWO_CALLS = rf"rank \d is in {CALL}, while rank \d is in {CALL}: all ranks must make the same"


class Rank:
    """A rank of the group, whose calls are all alike unless told otherwise."""

    def __init__(self, rank, ranks, strategy, check_ranks):
        self.wrong, self.ranks = rank == 1, ranks
        self.rank, self.strategy, self.check_ranks = rank, strategy, check_ranks
        self.layout = seqpar.Layout.zigzag([0, 40, 64], ranks)

    def forward(self, strategy=None, tokens=64):
        strategy = strategy or self.strategy
        if strategy.startswith("lasp2"):
            transport = "scan" if strategy.endswith("scan") else "all_gather"
            attn = seqpar.LASP2Attention(dist.group.WORLD, transport, check_ranks=self.check_ranks)
        elif strategy.startswith("recurrent"):
            transport = strategy.partition(" ")[2] or "all_gather"
            attn = gated_delta(dist.group.WORLD, transport, check_ranks=self.check_ranks)
        else:
            attn = module(strategy, dist.group.WORLD, check_ranks=self.check_ranks)
        layout = seqpar.Layout.zigzag([0, 40, tokens], self.ranks)
        q, k, v = (torch.randn(layout.tokens_on(self.rank), 4, 8).requires_grad_() for _ in "qkv")
        return attn(q, k, v, layout, causal=True).sum()


def skips_a_backward(rank):
    for call in range(3):
        out = rank.forward()
        if not (rank.wrong and call == 1):
            out.backward()


def runs_backwards_in_another_order(rank):
    outs = [rank.forward(), rank.forward()]
    for out in reversed(outs) if rank.wrong else outs:
        out.backward()


def calls_twice(rank):
    for _ in range(1 + rank.wrong):
        out = rank.forward()
    out.backward()


def calls_another_strategy(rank):
    rank.forward("all_gather" if rank.wrong and rank.strategy != "all_gather" else "ring")


def unshards_another_dtype(rank):
    x = torch.ones(rank.layout.tokens_on(rank.rank), 3)
    rank.layout.unshard(x.double() if rank.wrong else x, dist.group.WORLD)


def goes_on_after_an_error(rank):
    """Go on with a call of another size, while the others are still in the one that failed."""
    if rank.wrong:
        with pytest.raises((TypeError, ValueError)):
            seqpar.RingAttention(dist.group.WORLD)(*[torch.ones(1)] * 3, rank.layout, causal=True)
    rank.forward(tokens=64 + 32 * rank.wrong)


def raises(rank):
    rank.forward().backward()
    if rank.wrong:
        raise ValueError("mine")
    rank.forward()


def leaves_messages_unfinished(rank):
    module("ring", dist.group.WORLD)
    if rank.wrong:
        comm = seqpar.comm.messages.comm.Comm.of(dist.group.WORLD)
        x = torch.ones(1000)
        comm.exchange([(0, x)], [(0, x.clone())], label="test", step=3)
    else:
        rank.forward()


def be_a_rank(rank, ranks, path, pipe, mistake, strategy, check_ranks):
    """Send how it ended, and how many seconds it took; then end the interpreter: multiprocessing
    would not."""
    torch.set_num_threads(1)
    connect(rank, ranks, path)
    dist.barrier()
    start, error = time.monotonic(), ""
    try:
        mistake(Rank(rank, ranks, strategy, check_ranks))
    except (seqpar.PeerError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    pipe.send((error, time.monotonic() - start))
    ctypes.pythonapi.Py_Exit(0)


def ends(folder, mistake, strategy="ring", ranks=2, check_ranks=False):
    """How each rank ended: the error, and the seconds that it took. All exit normally."""
    arguments = mistake, strategy, check_ranks
    processes, pipes = launch(be_a_rank, ranks, f"{folder}/store", *arguments)
    try:
        assert all(pipe.poll(2 * TIMEOUT) for pipe in pipes), "hangs"
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join(TIMEOUT)
        assert [process.exitcode for process in processes] == [0] * ranks, found
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


MISTAKES = itertools.cycle((skips_a_backward, runs_backwards_in_another_order, calls_twice))
MIXED = [*zip(MISTAKES, ALL, itertools.cycle((False, True)), strict=False)]
QUICK = [(skips_a_backward, "ulysses", False), (runs_backwards_in_another_order, "ring", False)]
# With check_ranks these raise a ValueError: see tests/ranks.
OTHERS = [(calls_another_strategy, strategy, False) for strategy in ("ring", "usp")]
ROWS = [*QUICK, *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in MIXED + OTHERS)]


@pytest.mark.parametrize(("mistake", "strategy", "check_ranks"), ROWS)
def test_ranks_in_different_calls_name_both(tmp_path, mistake, strategy, check_ranks):
    found = ends(tmp_path, mistake, strategy, 2 if strategy == "ring" else 4, check_ranks)
    for error, seconds in found:
        assert re.match(f"PeerError: {IN_TWO_CALLS}", error), found
        assert seconds < SOON, found


def test_messages_of_another_size_are_named(tmp_path):
    found = ends(tmp_path, unshards_another_dtype)
    for error, seconds in found:
        assert "are in call 1, step 0 of unshard forward, but rank" in error, found
        assert "(96 float32)" in error and "(96 float64)" in error, found
        assert seconds < SOON, found


def apart(rank):
    """Every document is whole on one rank, so nobody needs anything of rank 1's backward."""
    layout = seqpar.Layout.contiguous([0, 32, 64], 2)
    for strategy in ("ring", "all_gather", "token_ring"):
        attn = module(strategy, dist.group.WORLD, check_ranks=rank.check_ranks)
        for call in range(3):
            q = torch.randn(32, 2, 8, requires_grad=True)
            out = attn(q, q, q, layout, causal=True)
            if not (rank.wrong and call == 1):
                out.sum().backward()
    rank.forward("ulysses").backward()


def calls_alone(rank):
    """Rank 1 makes calls in which nobody needs anything of it; rank 0 leaves out one, in which it
    has no tokens."""
    attn, apart = module("ring", dist.group.WORLD), seqpar.Layout.contiguous([0, 32, 64], 2)
    few = seqpar.Layout.contiguous([0, 1], 2)
    for _ in range(2):
        for layout in [apart] * rank.wrong + [few] * (few.tokens_on(rank.rank) > 0):
            q = torch.randn(layout.tokens_on(rank.rank), 2, 8, requires_grad=True)
            attn(q, q, q, layout, causal=True).sum().backward()
        rank.forward().backward()


def test_a_call_without_messages_may_be_made_alone(tmp_path):
    assert [error for error, _ in ends(tmp_path, calls_alone)] == ["", ""]


@pytest.mark.parametrize("check_ranks", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_backward_without_messages_may_be_skipped(tmp_path, check_ranks):
    assert [error for error, _ in ends(tmp_path, apart, check_ranks=check_ranks)] == ["", ""]


ERRORS = {  # of rank 1, and of the others
    goes_on_after_an_error: (
        "PeerError: ",
        "PeerError: layout and kv_layout must be the same on all ranks: rank . and rank . differ",
    ),
    raises: ("ValueError: mine", "PeerError: rank 1 left the group"),
    leaves_messages_unfinished: ("$", "PeerError: rank (1 left the group|. is in call .*, while)"),
}
RUNS = [1, pytest.param(8, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("mistake", ERRORS)
def test_no_rank_aborts_because_another_erred(tmp_path, mistake, runs):
    for run in range(runs):
        folder = tmp_path / str(run)
        folder.mkdir()
        found = [error for error, _ in ends(folder, mistake, "ring", 3)]
        mine, others = ERRORS[mistake]
        expected = [others, mine, others]
        assert all(map(re.match, expected, found)), (run, found)
