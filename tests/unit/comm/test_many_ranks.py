"""What starting, comparing and watching cost on each of thousands of virtual ranks."""

import math
from contextlib import ExitStack

import pytest
import torch

from seqpar.comm.agreement import compare_calls
from seqpar.comm.faults.heartbeat import MAX_ROUNDS_PER_SECOND, interval
from seqpar.comm.faults.process_state_server import ALIVE, GONE
from seqpar.comm.faults.witness import LEFT, MAX_SILENT_READS, MAX_WATCHED
from seqpar.comm.messages.comm import Comm, Pending
from tests.support.heartbeats import INTERVAL, TIMEOUT, World
from tests.support.ranks import virtual

RANKS = 16_384
LIMIT = 4 * math.log2(RANKS)  # keys that one rank may read or write in a round
DEAD = 9_000
SAMPLE = {0, 1, RANKS - 1, *range(DEAD - MAX_WATCHED - 2, DEAD + 3), *range(5, RANKS, 1111)}


class ManyRanks(World):
    """Ranks of which `active` ones compute. The others do nothing but write beats.

    Beats that no active rank reads are left out. `absent` ranks write none; `doing` is the exchange
    in which the others wait, if any.
    """

    def __init__(self, active=SAMPLE, absent=(DEAD,), doing=""):
        words = dict.fromkeys(range(RANKS), ALIVE) | {DEAD: GONE}
        super().__init__(begun=active, words=words, ranks=RANKS)
        ahead = {(rank + step) % RANKS for rank in active for step in range(-1, 100)}
        self.others, self.doing = ahead - set(active) - set(absent), doing
        for rank in ahead:
            self.store.values.setdefault(f"beat {rank}", "0 ")
            self.store.values.setdefault(f"state server {rank}", f"state server of {rank}")

    def rounds(self, count):
        for _ in range(count):
            for rank in self.others:
                self.store.values[f"beat {rank}"] = f"{self.time} {self.doing}"
            super().rounds(1)


def waits(world, ranks):
    """Waits of some ranks, each for the rank before it, as in Ring."""
    stack = ExitStack()
    for rank in ranks:
        stack.enter_context(world.waiting(rank, [(rank - 1) % RANKS]))
    return stack


def test_many_ranks_start_with_few_store_operations():
    world = World(begun=SAMPLE, ranks=RANKS)
    assert world.store.operations == 2 * len(SAMPLE)


def test_many_ranks_name_a_dead_one_cheaply():
    """The dead rank is far from most ranks, of which each reads few beats, the leader too."""
    world, active = ManyRanks(), SAMPLE
    world.rounds(2)
    world.running.remove(DEAD)
    began = world.time
    with waits(world, active - {DEAD}):
        while len(world.interrupted) < len(active) - 1:
            world.rounds(1)
            assert world.time - began < TIMEOUT / 2
    assert world.store.values["verdict"].startswith(f"rank {DEAD} died or was stopped: ")
    assert set(world.interrupted) == active - {DEAD}
    assert max(world.most.values()) <= LIMIT and {0, DEAD - 1} <= set(world.most)
    assert sum(asked == {DEAD} for asked in world.asked) <= 3 * MAX_WATCHED


def test_a_dead_rank_is_named_while_neighbours_compute():
    world = ManyRanks()
    world.rounds(2)
    world.running.remove(DEAD)
    with world.waiting(5, range(DEAD - 100, DEAD + 100)):  # more peers than one rank reads
        world.rounds(MAX_SILENT_READS + 3)
    assert set(world.interrupted) == {5}


def test_ranks_that_left_are_not_watched():
    """All that watched the dead rank have left, so others read on after them."""
    left = range(DEAD - 5 * MAX_WATCHED, DEAD)
    world = ManyRanks({0, left.start - 1}, (DEAD, *left))
    for rank in left:
        world.store.values[f"beat {rank}"] = LEFT
    with waits(world, [0]):
        world.rounds(MAX_SILENT_READS + 8)
    assert world.store.values["verdict"].startswith(f"rank {DEAD} ")


def test_an_idle_rank_far_away_is_named():
    """A rank that knows only live ranks leaves the judgement to those that know the idle one."""
    world = ManyRanks({0, DEAD - 1, DEAD}, (), "call 1, step 1 of ring forward")
    with waits(world, [DEAD - 1]):
        for wait in world.ranks[DEAD - 1]._waits:
            wait.failed = True
        said = world.failure(0, [RANKS - 1])
    assert said.startswith(f"rank {DEAD} is alive but did not send, and is in no exchange: ")


def test_rounds_of_all_ranks_share_a_limit():
    assert interval(3600.0, 3) == interval(3600.0, MAX_ROUNDS_PER_SECOND) == 1.0
    assert RANKS / interval(3600.0, RANKS) <= MAX_ROUNDS_PER_SECOND
    assert interval(TIMEOUT, RANKS) == INTERVAL  # a dead rank is named within the timeout


def counted(monkeypatch, rank, ranks, call):
    """The messages that one of many ranks sends, and their bytes; its own come back."""
    sizes = []

    def exchange(comm, sends, recvs, label, step=0):
        sizes.extend(x.nbytes for _, x in sends)
        for (_, sent), (_, received) in zip(sends, recvs, strict=True):
            received.copy_(sent)
        return Pending([], [])

    monkeypatch.setattr(Comm, "_exchange", exchange)
    call(Comm("many", rank, ranks))
    return len(sizes), sum(sizes)


@pytest.mark.parametrize("rank", [0, 1, RANKS // 2, RANKS - 1])
def test_many_ranks_compare_calls_in_few_messages(monkeypatch, rank):
    agree = lambda comm: compare_calls(comm, "ring", None, lambda canonical: {"causal": True})  # noqa: E731
    assert counted(monkeypatch, rank, RANKS, agree) == (14, 14 * 64)
    gather = lambda comm: comm.all_gather(torch.zeros(2), label="test")  # noqa: E731
    assert counted(monkeypatch, rank, RANKS, gather) == (14, 8 * (RANKS - 1))


def gathered(comm):
    own = torch.tensor([comm.rank, -comm.rank])
    everyone = torch.stack(comm.all_gather(own, label="test"))
    return everyone[:, 0].tolist(), comm.maximum(own, label="test").tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_gathering_and_maxima_reach_all_ranks(ranks):
    assert virtual(ranks, gathered) == [(list(range(ranks)), [ranks - 1, 0])] * ranks


def disagree(comm):
    try:
        compare_calls(comm, "ring", None, lambda canonical: {"causal": comm.rank in (3, 4)})
    except ValueError as error:
        return str(error)


def test_an_error_names_the_ranks_that_differ():
    said = (
        "causal must be the same on all ranks: rank 0 has False, rank 3 has True, rank 4 has True"
    )
    assert virtual(20, disagree) == [said] * 20


def agree_on_meta(comm):
    with torch.device("meta"):
        compare_calls(comm, "ring", None, lambda canonical: {"causal": True})


def test_comparing_calls_ignores_the_default_device():
    virtual(2, agree_on_meta)
