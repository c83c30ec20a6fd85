"""Whom heartbeats blame, on a fake store and a fake clock: no threads, no processes, no time."""

import contextlib
import itertools

import pytest

from seqpar.comm.heartbeat import Clock, Heartbeat, PeerError
from seqpar.comm.liveness import UNANSWERED, UNKNOWN
from seqpar.comm.watcher import ALIVE, GONE, STOPPED
from seqpar.comm.witness import GRACE, LEFT, SILENT, Witness

TIMEOUT = 10.0
INTERVAL = TIMEOUT / 40
FORWARD = "step 1 of ring forward"
KEEPER = "global rank 0"
LOST = f"the store does not answer: {KEEPER}, which keeps it, died, left or was stopped"
CHECK = "did all ranks make the same call? check_ranks=True finds out"


class Hung(BaseException):
    """A call of the store that never returns: the round in which it is made never ends."""


class FakeStore:
    """A dict. With `trouble`, an exception, it is gone or hangs."""

    def __init__(self):
        self.values, self.trouble, self.reads = {}, None, 0

    def set(self, key, value):
        self._answer()
        self.values[key] = value

    def check(self, keys):
        self._answer()
        self.reads += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        self._answer()
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key, expected, desired):
        self._answer()
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()

    def _answer(self):
        if self.trouble is not None:
            raise self.trouble


class World(Clock):
    """Ranks 0 to 2 of a group: as time passes, those of `running` make a round an interval."""

    def __init__(self, begun=(0, 1, 2), words=()):
        self.time, self.store, self.interrupted = 1000.0, FakeStore(), []
        self.words, self.asked = dict(words), []  # what the watchers of ranks say
        self.ranks = {rank: self.begin(rank) for rank in begun}
        self.running = set(begun)

    def begin(self, rank):
        names = [f"rank {i}" for i in range(3)]
        interrupt = lambda: self.interrupted.append(rank)  # noqa: E731
        watcher = f"watcher of {rank}" if rank in self.words else ""
        return Heartbeat(
            self.store, rank, names, TIMEOUT, interrupt, LOST, self, watcher=watcher, ask=self.ask
        )

    def ask(self, addresses, seconds):
        assert all(address == f"watcher of {rank}" for rank, address in addresses.items())
        self.asked.append(set(addresses))
        return {rank: self.words[rank] for rank in addresses}

    def rounds(self, count):
        for _ in range(count):
            self.time += INTERVAL
            for rank in sorted(self.running):
                try:
                    if not self.ranks[rank].round():
                        self.running.discard(rank)
                except Hung:
                    self.running.discard(rank)

    def leave(self, rank):
        self.ranks[rank].stop()
        self.rounds(1)

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.rounds(round(seconds / INTERVAL))

    def wait_for(self, changed, done, seconds):
        end = self.time + seconds
        while not done() and self.time < end:
            self.rounds(1)

    def waiting(self, rank, peers, doing=FORWARD):
        return self.ranks[rank].blame_on_failure(doing, peers)

    def failure(self, rank, peers, doing=FORWARD):
        """The error of a wait which gloo makes fail."""
        with pytest.raises(PeerError) as caught, self.waiting(rank, peers, doing):
            raise RuntimeError("connection closed")
        return str(caught.value)


def test_a_dead_rank_is_named_with_who_waited_for_whom():
    world = World()
    world.rounds(5)
    world.running.remove(2)
    began = world.time
    said = world.failure(0, [1])
    assert said == (
        f"rank 2 died or was stopped: no heartbeat for 2.5 s. rank 0 was in {FORWARD} and waited "
        "for rank 1. gloo said: connection closed"
    )
    assert world.time - began <= (SILENT + 3) * INTERVAL < TIMEOUT  # and 2 for others to read it


def test_all_dead_ranks_are_named():
    world = World()
    world.rounds(5)
    world.running = {0}
    assert world.failure(0, [1]).startswith("rank 1 and rank 2 died or was stopped: ")


def test_a_dead_rank_ends_waits_that_have_not_failed():
    world = World()
    with world.waiting(0, [1]):
        world.rounds(2)
        world.running.remove(2)
        world.rounds(SILENT - 1)
        assert world.interrupted == []
        world.rounds(2)
        assert set(world.interrupted) == {0}  # rank 1 waits for nothing


def test_a_failed_wait_is_not_interrupted_but_another_of_the_same_rank_is():
    world = World()
    world.rounds(2)
    world.running.remove(2)
    world.failure(0, [2])
    assert world.interrupted == []
    with world.waiting(0, [1]):
        world.failure(0, [2])
        world.rounds(1)
        assert set(world.interrupted) == {0}


def test_a_stopped_rank_that_goes_on_is_told_that_it_is_to_blame():
    world = World()
    world.rounds(5)
    world.running.remove(2)
    first = world.failure(0, [1])
    world.running.add(2)
    assert first.startswith("rank 2 died or was stopped: no heartbeat for 2.5 s. ")
    assert world.failure(2, [0]).startswith("rank 2 died or was stopped: no heartbeat for 2.5 s. ")


def test_all_ranks_adopt_the_first_verdict():
    """Also those that would judge otherwise, since ranks that raised have fallen silent."""
    world = World()
    world.rounds(5)
    world.running.remove(2)
    world.failure(0, [2])
    world.running.remove(0)  # its process ends
    world.rounds(3 * SILENT)
    assert world.failure(1, [0]).startswith("rank 2 died or was stopped: ")


def test_a_verdict_is_adopted_in_the_next_round():
    world = World()
    world.store.values["verdict"] = "rank 2 left the group"
    with world.waiting(0, [1]):
        world.rounds(1)
        assert world.interrupted == [0]


def test_of_two_verdicts_at_the_same_time_the_first_counts():
    world = World()
    world.rounds(5)
    world.running.remove(2)
    compare_set = world.store.compare_set

    def compare_set_after_another(*arguments):
        world.store.values["verdict"] = "rank 1 left the group"
        return compare_set(*arguments)

    world.store.compare_set = compare_set_after_another
    assert world.failure(0, [1]).startswith("rank 1 left the group. ")


def test_a_rank_that_left_is_named_by_who_waited_for_it():
    world = World()
    world.leave(2)
    assert world.store.values["beat 2"] == LEFT
    assert world.failure(0, [1, 2]).startswith("rank 2 left the group. ")


def test_a_rank_that_left_is_not_blamed_for_waits_on_others():
    world = World()
    world.leave(2)
    with world.waiting(1, [0], "step 0 of ring forward"):
        said = world.failure(0, [1])
    assert said.startswith(
        "all ranks are alive but wait for each other (rank 1 in step 0 of ring forward): "
    )


def test_a_rank_that_left_before_any_wait_failed_is_not_blamed():
    world = World()
    world.leave(2)
    with world.waiting(0, [1, 2]):
        world.rounds(5 * SILENT)
    assert "verdict" not in world.store.values and world.interrupted == []


def test_a_rank_that_never_came_is_named_once_a_wait_failed():
    world = World(begun=(0, 1))
    with world.waiting(0, [2]):
        world.rounds(5 * SILENT)
        assert "verdict" not in world.store.values  # it may yet come
    assert world.failure(0, [2]).startswith("rank 2 died, or never made a module for this group. ")


def test_a_rank_that_comes_late_is_not_blamed():
    world = World(begun=(0, 1))
    with world.waiting(0, [2]):
        world.rounds(2 * SILENT)
        world.ranks[2] = world.begin(2)
        world.running.add(2)
        world.rounds(2 * SILENT)
    assert "verdict" not in world.store.values


def test_an_idle_rank_is_named():
    world = World()
    with world.waiting(1, [2]):
        said = world.failure(0, [1])
    assert said.startswith(f"rank 2 is alive but did not send, and is in no exchange: {CHECK}. ")


def test_ranks_that_wait_for_each_other_are_told_what_each_does():
    world = World()
    with (
        world.waiting(1, [2], "step 2 of ring forward"),
        world.waiting(2, [0], "step 0 of ulysses backward, heads"),
    ):
        said = world.failure(0, [1])
    doing = "rank 1 in step 2 of ring forward; rank 2 in step 0 of ulysses backward, heads"
    assert said.startswith(f"all ranks are alive but wait for each other ({doing}): {CHECK}. ")


def test_the_last_of_several_waits_is_what_a_rank_is_in():
    world = World()
    with world.waiting(1, [0], "step 0 of ring forward"), world.waiting(1, [0], FORWARD):
        world.rounds(1)
        assert world.store.values["beat 1"].endswith(f" {FORWARD}")
    world.rounds(1)
    assert world.store.values["beat 1"].endswith(" ")


def test_a_rank_is_alive_only_if_it_beat_after_the_failure():
    """Else one that died in the last round would be called idle."""
    world = World()
    with world.waiting(0, [1]):
        world.rounds(3)
        world.running.remove(2)
        assert world.failure(0, [1]).startswith("rank 2 died or was stopped: ")


def test_a_store_that_is_gone_is_to_blame():
    world = World()
    world.rounds(2)
    world.store.trouble = RuntimeError("connection reset")
    began = world.time
    assert world.failure(0, [1]).startswith(f"{LOST}. rank 0 was in ")
    assert world.time - began <= 3 * INTERVAL


def test_a_store_that_is_gone_matters_only_if_a_wait_fails():
    world = World()
    with world.waiting(0, [1]):
        world.rounds(2)
        world.store.trouble = RuntimeError("connection reset")
        world.rounds(10 * SILENT)
    assert world.interrupted == []


@pytest.mark.parametrize("rounds_before", [0, 1, 5, 100])
def test_a_store_that_hangs_is_to_blame(rounds_before):
    """The time for which it had hung when the wait failed counts, but this rank may have been
    stopped meanwhile, so it listens a little longer."""
    world = World()
    world.store.trouble = Hung()
    world.rounds(1)
    world.time += rounds_before * INTERVAL
    began = world.time
    assert world.failure(0, [1]).startswith(f"{LOST}. rank 0 was in ")
    waited = (world.time - began) / INTERVAL
    assert waited == pytest.approx(max(5, SILENT + 5 - rounds_before) + 2)


def test_a_machine_that_stood_still_blames_nobody():
    world = World()
    with world.waiting(0, [1]), world.waiting(1, [2]), world.waiting(2, [0]):
        for _ in range(5):
            world.rounds(SILENT - 1)
            world.time += 1000
        world.rounds(2)
    assert "verdict" not in world.store.values


def test_silence_counts_only_while_this_rank_listens():
    world = World()
    world.rounds(2)
    world.running.remove(2)
    for _ in range(5):
        with world.waiting(0, [1]):
            world.rounds(SILENT - 1)
        world.rounds(1)
    assert "verdict" not in world.store.values


def test_a_rank_that_waits_for_nothing_reads_nothing():
    world = World()
    world.rounds(10)
    assert world.store.reads == 0 and world.store.values["beat 1"] == "10 "


def test_the_error_of_a_group_that_this_rank_destroyed_is_gloos_own():
    world = World()
    world.leave(0)
    gone = RuntimeError("the group is no more")
    with pytest.raises(RuntimeError) as caught, world.waiting(0, [1]):
        raise gone
    assert caught.value is gone


def test_other_errors_pass_and_end_the_wait():
    world = World()
    with contextlib.suppress(KeyError), world.waiting(0, [1]):
        raise KeyError
    world.rounds(1)
    assert world.store.values["beat 0"].endswith(" ")


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
        (ALIVE, "0", SILENT, f"rank 2 {LOCKED} 2.5 s: "),
        (STOPPED, "100", SILENT - 1, ""),
        (STOPPED, "100", SILENT, "rank 2 died or was stopped: no heartbeat for 2.5 s"),
        (GONE, "100", SILENT, "rank 2 died or was stopped: no heartbeat for 2.5 s"),
        (UNKNOWN, "100", SILENT + UNANSWERED - 2, ""),
        (UNKNOWN, "100", SILENT + UNANSWERED - 1, "rank 2 died or was stopped: no heartbeat for 3"),
        (None, None, SILENT, "rank 2 died or was stopped: no heartbeat for 2.5 s"),  # no watcher
        (None, "4", 15, ""),
        (None, "4", 16, "rank 2 died or was stopped: no heartbeat for 4.0 s"),
    ],
)
def test_a_silent_rank_is_blamed_if_it_is_dead_or_silent_beyond_the_grace(
    monkeypatch, word, grace, reads, verdict
):
    if grace is not None:
        monkeypatch.setenv(GRACE, grace)
    said = silent_for(World(words={} if word is None else {2: word}), reads)
    assert said.startswith(verdict) and bool(said) == bool(verdict), said


def test_only_watchers_of_silent_ranks_are_asked():
    world = World(words=dict.fromkeys(range(3), ALIVE))
    silent_for(world, SILENT - 1)
    assert world.asked == []
    world.rounds(1)
    silent_for(world, SILENT + 1)
    assert world.asked and all(asked == {2} for asked in world.asked)


def test_a_silent_rank_that_goes_on_is_not_blamed():
    world = World(words={2: ALIVE})
    for _ in range(3):
        assert silent_for(world, 3 * SILENT) == ""
        world.running.add(2)
        world.rounds(2)
    assert world.interrupted == []


def test_a_silent_rank_that_lives_is_named_once_a_wait_failed():
    world = World(words={2: ALIVE})
    world.rounds(2)
    world.running.remove(2)
    began = world.time
    assert world.failure(0, [2]).startswith(f"rank 2 {LOCKED} 2.5 s")
    assert world.time - began <= (SILENT + 3) * INTERVAL


def test_a_dead_rank_is_named_rather_than_one_that_is_silent_but_lives():
    world = World(words={1: ALIVE, 2: GONE})
    world.rounds(2)
    with world.waiting(0, [2]):
        world.running.remove(1)
        world.rounds(5)
        world.running.remove(2)
        assert world.failure(0, [2]).startswith("rank 2 died or was stopped: no heartbeat for 2.5 ")


@pytest.mark.parametrize("grace", ["", "a while", "-1", "nan", "inf"])
def test_a_grace_that_is_no_number_of_seconds_is_refused(monkeypatch, grace):
    monkeypatch.setenv(GRACE, grace)
    world = World(begun=())
    with pytest.raises(ValueError, match=f"^{GRACE} must be a number of seconds, 0 or more, got "):
        world.begin(0)
    assert world.store.values == {}


def test_a_rank_that_stood_still_learns_that_it_is_to_blame_though_it_waits_for_nothing():
    """Those that blamed it may end soon, and the store with them."""
    world = World()
    world.rounds(2)
    world.running.remove(2)
    world.failure(0, [1])
    world.running = {2}
    world.rounds(1)
    world.store.trouble = RuntimeError("connection reset")
    assert world.failure(2, [0]).startswith("rank 2 died or was stopped: no heartbeat for 2.5 s. ")


def test_a_rank_that_stood_still_until_the_store_was_gone_names_itself():
    world = World()
    world.rounds(2)
    world.time += 7
    world.store.trouble = RuntimeError("connection reset")
    said = world.failure(1, [0])
    assert said.startswith(f"rank 1 was stopped, or could not run Python, for 7.0 s; {LOST}. ")


def test_a_store_that_answers_is_not_to_blame_though_rounds_take_long():
    world = World(words={2: ALIVE})
    world.rounds(2)
    world.running.remove(2)
    heart, calls = world.ranks[0], itertools.count(1)
    make_round = heart.round
    heart.round = lambda: next(calls) % SILENT or make_round()
    assert world.failure(0, [2]).startswith(f"rank 2 {LOCKED}")
    assert next(calls) > SILENT**2


def test_the_thread_makes_rounds_until_it_is_stopped():
    """The one test with a real thread. Its clock does not wait."""
    world = World(begun=())
    heart = world.ranks[0] = world.begin(0)
    ended = []
    world.wait_for = lambda changed, done, seconds: ended.append(seconds) or changed.wait(0)
    heart.start()
    heart.stop()
    assert world.store.values["beat 0"] == LEFT and set(ended) <= {INTERVAL}


def test_a_witness_counts_reads_of_the_same_beat():
    witness = Witness(0, ["rank 0", "rank 1"], 1.0)
    for _ in range(SILENT):
        witness.hear({1: "0 "})
        assert witness.silent() == {} and witness.judge([], {}) == ""
    witness.hear({1: "0 "})
    assert witness.silent() == {1: 10.0}
    assert witness.judge([], {1: GONE}) == "rank 1 died or was stopped: no heartbeat for 10.0 s"
