"""When a silent rank is to blame, and what it says itself, on a fake store and a fake clock."""

import itertools

import pytest

from seqpar.comm.faults.process_state_server import ALIVE, GONE, STOPPED
from seqpar.comm.faults.process_states import MAX_UNANSWERED, UNKNOWN
from seqpar.comm.faults.witness import GRACE, MAX_SILENT_READS, Witness
from tests.support.heartbeats import INTERVAL, LOST, TIMEOUT, World

LOCKED = "is alive, but no other thread of it could run Python for"


def silent_for(world, reads):
    """Rank 0 waits for rank 1, while rank 2 is silent in so many reads; the verdict, if any."""
    world.rounds(2)
    world.running.discard(2)
    with world.waiting(0, [1]):
        world.rounds(reads + 1)
        return world.store.values.get("verdict", "")


ALL = round(TIMEOUT / INTERVAL)


@pytest.mark.parametrize(
    ("word", "grace", "reads", "verdict"),
    [
        (ALIVE, None, ALL - 1, ""),
        (ALIVE, None, ALL, f"rank 2 {LOCKED} 10.0 s: a call holds the interpreter's lock"),
        (ALIVE, "4", 15, ""),
        (ALIVE, "4", 16, f"rank 2 {LOCKED} 4.0 s: "),
        (ALIVE, "0", MAX_SILENT_READS, f"rank 2 {LOCKED} 2.5 s: "),
        (STOPPED, "100", MAX_SILENT_READS - 1, ""),
        (STOPPED, "100", MAX_SILENT_READS, "rank 2 died or was stopped: no heartbeat for 2.5 s"),
        (GONE, "100", MAX_SILENT_READS, "rank 2 died or was stopped: no heartbeat for 2.5 s"),
        (UNKNOWN, "100", MAX_SILENT_READS + MAX_UNANSWERED - 2, ""),
        (
            UNKNOWN,
            "100",
            MAX_SILENT_READS + MAX_UNANSWERED - 1,
            "rank 2 died or was stopped: no heartbeat for 3",
        ),
        (
            None,
            None,
            MAX_SILENT_READS,
            "rank 2 died or was stopped: no heartbeat for 2.5 s",
        ),  # no state server
        (None, "4", 15, ""),
        (None, "4", 16, "rank 2 died or was stopped: no heartbeat for 4.0 s"),
    ],
)
def test_silence_is_blamed_if_dead_or_beyond_grace(monkeypatch, word, grace, reads, verdict):
    if grace is not None:
        monkeypatch.setenv(GRACE, grace)
    said = silent_for(World(words={} if word is None else {2: word}), reads)
    assert said.startswith(verdict) and bool(said) == bool(verdict), said


def test_only_state_servers_of_silent_ranks_are_asked():
    world = World(words=dict.fromkeys(range(3), ALIVE))
    silent_for(world, MAX_SILENT_READS - 1)
    assert world.asked == []
    world.rounds(1)
    silent_for(world, MAX_SILENT_READS + 1)
    assert world.asked and all(asked == {2} for asked in world.asked)


def test_silence_that_ends_is_not_blamed():
    world = World(words={2: ALIVE})
    for _ in range(3):
        assert silent_for(world, 3 * MAX_SILENT_READS) == ""
        world.running.add(2)
        world.rounds(2)
    assert world.interrupted == []


def test_a_silent_live_rank_is_named_after_failure():
    world = World(words={2: ALIVE})
    world.rounds(2)
    world.running.remove(2)
    began = world.time
    assert world.failure(0, [2]).startswith(f"rank 2 {LOCKED} 2.5 s")
    assert world.time - began <= (MAX_SILENT_READS + 3) * INTERVAL


def test_a_dead_rank_is_named_before_silent_ones():
    world = World(words={1: ALIVE, 2: GONE})
    world.rounds(2)
    with world.waiting(0, [2]):
        world.running.remove(1)
        world.rounds(5)
        world.running.remove(2)
        assert world.failure(0, [2]).startswith("rank 2 died or was stopped: no heartbeat for 2.5 ")


@pytest.mark.parametrize("grace", ["", "a while", "-1", "nan", "inf"])
def test_a_grace_that_is_not_seconds_is_refused(monkeypatch, grace):
    monkeypatch.setenv(GRACE, grace)
    world = World(begun=())
    with pytest.raises(ValueError, match=f"^{GRACE} must be a number of seconds, 0 or more, got "):
        world.begin(0)
    assert world.store.values == {}


def test_an_idle_paused_rank_learns_of_its_blame():
    """Those that blamed it may end soon, and the store with them."""
    world = World()
    world.rounds(2)
    world.running.remove(2)
    world.failure(0, [1])
    world.running = {2}
    world.rounds(1)
    world.store.trouble = RuntimeError("connection reset")
    assert world.failure(2, [0]).startswith("rank 2 died or was stopped: no heartbeat for 2.5 s. ")


def test_a_paused_rank_without_store_names_itself():
    world = World()
    world.rounds(2)
    world.time += 7
    world.store.trouble = RuntimeError("connection reset")
    said = world.failure(1, [0])
    assert said.startswith(f"rank 1 was stopped, or could not run Python, for 7.0 s; {LOST}. ")


def test_a_slow_but_answering_store_is_not_blamed():
    world = World(words={2: ALIVE})
    world.rounds(2)
    world.running.remove(2)
    heart, calls = world.ranks[0], itertools.count(1)
    make_round = heart.round
    heart.round = lambda: next(calls) % MAX_SILENT_READS or make_round()
    assert world.failure(0, [2]).startswith(f"rank 2 {LOCKED}")
    assert next(calls) > MAX_SILENT_READS**2


def test_a_witness_counts_reads_of_the_same_beat():
    witness = Witness(0, ["rank 0", "rank 1"], 1.0)
    for _ in range(MAX_SILENT_READS):
        witness.hear({1: "0 "})
        assert witness.silent() == {} and witness.judge([], {}) == ""
    witness.hear({1: "0 "})
    assert witness.silent() == {1: 10.0}
    assert witness.judge([], {1: GONE}) == "rank 1 died or was stopped: no heartbeat for 10.0 s"
