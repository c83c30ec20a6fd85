"""Whom heartbeats blame, on a fake store and a fake clock: no threads, no processes, no time."""

import contextlib
import threading

import pytest
import torch

from seqpar.comm.faults import heartbeat
from seqpar.comm.faults.heartbeat import PeerError, close_connections
from seqpar.comm.faults.witness import LEFT, MAX_ERROR_READS, MAX_SILENT_READS
from tests.support.heartbeats import CHECK, FORWARD, INTERVAL, LOST, TIMEOUT, Hung, World


def test_a_dead_rank_is_named_with_its_waiters():
    world = World()
    world.rounds(5)
    world.running.remove(2)
    began = world.time
    said = world.failure(0, [1])
    assert said == (
        f"rank 2 died or was stopped: no heartbeat for 2.5 s. rank 0 was in {FORWARD} and waited "
        "for rank 1. gloo said: connection closed"
    )
    assert (
        world.time - began <= (MAX_SILENT_READS + 3) * INTERVAL < TIMEOUT
    )  # and 2 for others to read it


def test_all_dead_ranks_are_named():
    world = World()
    world.rounds(5)
    world.running = {0}
    assert world.failure(0, [1]).startswith("rank 1 and rank 2 died or was stopped: ")


def test_a_dead_rank_ends_pending_waits():
    world = World()
    with world.waiting(0, [1]):
        world.rounds(2)
        world.running.remove(2)
        world.rounds(MAX_SILENT_READS - 1)
        assert world.interrupted == []
        world.rounds(2)
        assert set(world.interrupted) == {0}  # rank 1 waits for nothing


def test_a_failed_wait_is_not_interrupted():
    world = World()
    world.rounds(2)
    world.running.remove(2)
    world.failure(0, [2])
    assert world.interrupted == []
    with world.waiting(0, [1]):
        world.failure(0, [2])
        world.rounds(1)
        assert set(world.interrupted) == {0}


def test_a_resumed_rank_learns_that_it_is_blamed():
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
    world.rounds(3 * MAX_SILENT_READS)
    assert world.failure(1, [0]).startswith("rank 2 died or was stopped: ")


def test_a_verdict_is_adopted_in_the_next_round():
    world = World()
    world.store.values["verdict"] = "rank 2 left the group"
    with world.waiting(0, [1]):
        world.rounds(1)
        assert world.interrupted == [0]


def test_the_first_of_two_verdicts_counts():
    world = World()
    world.rounds(5)
    world.running.remove(2)
    compare_set = world.store.compare_set

    def compare_set_after_another(*arguments):
        world.store.values["verdict"] = "rank 1 left the group"
        return compare_set(*arguments)

    world.store.compare_set = compare_set_after_another
    assert world.failure(0, [1]).startswith("rank 1 left the group. ")


def test_a_rank_that_left_is_named_by_waiters():
    world = World()
    world.leave(2)
    assert world.store.values["beat 2"] == LEFT
    assert world.failure(0, [1, 2]).startswith("rank 2 left the group. ")


def test_leaving_is_not_blamed_for_other_waits():
    world = World()
    world.leave(2)
    with world.waiting(1, [0], "step 0 of ring forward"):
        said = world.failure(0, [1])
    assert said.startswith(
        "all ranks are alive but wait for each other (rank 1 in step 0 of ring forward): "
    )


def test_leaving_before_a_failure_is_not_blamed():
    world = World()
    world.leave(2)
    with world.waiting(0, [1, 2]):
        world.rounds(5 * MAX_SILENT_READS)
    assert "verdict" not in world.store.values and world.interrupted == []


def test_an_absent_rank_is_named_after_a_failure():
    world = World(begun=(0, 1))
    with world.waiting(0, [2]):
        world.rounds(5 * MAX_SILENT_READS)
        assert "verdict" not in world.store.values  # it may yet come
    assert world.failure(0, [2]).startswith("rank 2 died, or never made a module for this group. ")


def test_a_rank_that_comes_late_is_not_blamed():
    world = World(begun=(0, 1))
    with world.waiting(0, [2]):
        world.rounds(2 * MAX_SILENT_READS)
        world.ranks[2] = world.begin(2)
        world.running.add(2)
        world.rounds(2 * MAX_SILENT_READS)
    assert "verdict" not in world.store.values


def test_an_idle_rank_is_named():
    world = World()
    with world.waiting(1, [2]):
        said = world.failure(0, [1])
    assert said.startswith(f"rank 2 is alive but did not send, and is in no exchange: {CHECK}. ")


def test_an_error_of_one_rank_ends_waits():
    world = World()
    error = KeyError("a\nhook's")
    with world.waiting(0, [2]), world.waiting(1, [0]):
        world.ranks[2].report(error)
        world.ranks[2].report(error)  # as an outer context does
        world.rounds(MAX_ERROR_READS + 1)
        assert sorted(set(world.interrupted)) == [0, 1]
    expected = "rank 2 raised an error, and did not send: KeyError: "
    assert world.store.values["verdict"].startswith(expected)
    assert "\n" not in world.store.values["verdict"].removeprefix(expected)


def test_an_error_of_all_ranks_is_not_blamed():
    world = World()
    for rank in world.ranks.values():
        rank.report(ValueError("text"))
    with world.waiting(0, [2]):  # rank 2 comes late
        world.rounds(2 * MAX_SILENT_READS)
        with world.waiting(2, [0]):
            world.rounds(1)
    world.rounds(2)
    with world.waiting(1, [2]):
        world.rounds(2 * MAX_SILENT_READS)
    assert "verdict" not in world.store.values


def test_an_error_ends_when_its_rank_waits():
    world = World()
    world.ranks[2].report(ValueError("text"))
    with world.waiting(0, [2]), world.waiting(2, [0]):
        world.rounds(2 * MAX_SILENT_READS)
    assert "verdict" not in world.store.values


def test_mutual_waiters_learn_what_each_one_does():
    world = World()
    with (
        world.waiting(1, [2], "step 2 of ring forward"),
        world.waiting(2, [0], "step 0 of ulysses backward, heads"),
    ):
        said = world.failure(0, [1])
    doing = "rank 1 in step 2 of ring forward; rank 2 in step 0 of ulysses backward, heads"
    assert said.startswith(f"all ranks are alive but wait for each other ({doing}): {CHECK}. ")


def test_the_last_of_nested_waits_is_reported():
    world = World()
    with world.waiting(1, [0], "step 0 of ring forward"), world.waiting(1, [0], FORWARD):
        world.rounds(1)
        assert world.store.values["beat 1"].endswith(f" {FORWARD}")
    world.rounds(1)
    assert world.store.values["beat 1"].endswith(" ")


def test_only_a_beat_after_the_failure_proves_life():
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


def test_a_lost_store_matters_only_after_a_failure():
    world = World()
    with world.waiting(0, [1]):
        world.rounds(2)
        world.store.trouble = RuntimeError("connection reset")
        world.rounds(10 * MAX_SILENT_READS)
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
    assert waited == pytest.approx(max(5, MAX_SILENT_READS + 5 - rounds_before) + 2)


def test_a_machine_that_stood_still_blames_nobody():
    world = World()
    with world.waiting(0, [1]), world.waiting(1, [2]), world.waiting(2, [0]):
        for _ in range(5):
            world.rounds(MAX_SILENT_READS - 1)
            world.time += 1000
        world.rounds(2)
    assert "verdict" not in world.store.values


def test_silence_counts_only_while_this_rank_listens():
    world = World()
    world.rounds(2)
    world.running.remove(2)
    for _ in range(5):
        with world.waiting(0, [1]):
            world.rounds(MAX_SILENT_READS - 1)
        world.rounds(1)
    assert "verdict" not in world.store.values


def test_a_rank_that_waits_for_nothing_reads_nothing():
    world = World()
    world.rounds(10)
    assert world.store.reads == 0 and world.store.values["beat 1"] == "10 "


def test_destroying_the_group_keeps_gloos_own_error():
    world = World()
    world.leave(0)
    gone = RuntimeError("the group is no more")
    with pytest.raises(RuntimeError) as caught, world.waiting(0, [1]):
        raise gone
    assert caught.value is gone


def test_one_ranks_finding_is_every_ranks_verdict():
    world, cause = World(), "rank 1 is in call 8, while rank 0 is in call 7"
    with world.waiting(2, [1]):
        world.rounds(1)
        with pytest.raises(PeerError) as caught, world.waiting(0, [1]):
            raise PeerError(world.ranks[0].accuse(cause))
        assert str(caught.value) == cause
        assert set(world.interrupted) == {0, 2}  # rank 1 waits for nothing
    assert world.failure(2, [1]).startswith(f"{cause}. rank 2 was in {FORWARD}")
    assert world.ranks[1].accuse("rank 0 is in call 7, while rank 1 is in call 8") == cause


def test_a_rank_without_store_raises_its_finding():
    world = World()
    world.store.trouble = RuntimeError("connection reset")
    assert world.ranks[0].accuse("rank 1 is in call 8") == "rank 1 is in call 8"


def test_a_hanging_store_does_not_delay_a_finding(monkeypatch):
    world, resumed = World(), threading.Event()
    monkeypatch.setattr(heartbeat, "MAX_STORE_INTERVALS", 1)
    world.store.compare_set = lambda *_: resumed.wait(20) and b"another cause"
    assert world.ranks[0].accuse("rank 1 is in call 8") == "rank 1 is in call 8"
    resumed.set()


def test_other_errors_pass_and_end_the_wait():
    world = World()
    with contextlib.suppress(KeyError), world.waiting(0, [1]):
        raise KeyError
    world.rounds(1)
    assert world.store.values["beat 0"].endswith(" ")


def test_the_thread_makes_rounds_until_it_is_stopped():
    """The one test with a real thread. Its clock does not wait."""
    world = World(begun=())
    heart = world.ranks[0] = world.begin(0)
    ended = []
    world.wait_for = lambda changed, done, seconds: ended.append(seconds) or changed.wait(0)
    heart.start()
    heart.stop()
    assert world.store.values["beat 0"] == LEFT and set(ended) <= {INTERVAL}


class FakeGroup:
    """A gloo group of two ranks whose receives time out; it notes their devices."""

    def __init__(self):
        self.devices = []

    def rank(self):
        return 0

    def size(self):
        return 2

    def recv(self, tensors, peer, tag):
        self.devices += [x.device.type for x in tensors]
        raise RuntimeError("Timed out")


def test_closing_connections_ignores_the_default_device():
    group = FakeGroup()
    with torch.device("meta"):
        close_connections(group)
    assert group.devices == ["cpu"]
