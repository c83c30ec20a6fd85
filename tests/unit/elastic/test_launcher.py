"""Who forms the next group, on processes and a store that are stand-ins."""

import json

import pytest

from seqpar.comm.faults.process_state_server import ALIVE, STOPPED
from seqpar.elastic import launcher
from seqpar.elastic.launcher import Launcher, LauncherLimits
from seqpar.elastic.messages import Place, ProcessReport, place_key, report_key
from tests.support.heartbeats import FakeStore


class FakeProcess:
    def __init__(self, pid):
        self.pid, self.code = pid, None

    def poll(self):
        return self.code

    def kill(self):
        self.code = -9


class Training:
    """Processes from number 1 on, which report and get places."""

    def __init__(self, **limits):
        self.store, self.processes, self.reports = FakeStore(), {}, {}
        self.store.get = lambda key: self.store.values[key].encode()
        self.launcher = Launcher(self.store, self.start, LauncherLimits(**limits))
        for _ in range(limits["ranks"] + limits.get("spares", 0)):
            self.launcher._add()

    def start(self, number):
        self.processes[number] = FakeProcess(number)
        return self.processes[number]

    def report(self, finished, *numbers, done=False):
        for number in numbers:
            self.reports[number] = self.reports.get(number, 0) + 1
            key = report_key(number, self.reports[number])
            self.store.set(key, json.dumps(ProcessReport(finished, done)))
        self.launcher.tick()

    def kill(self, *numbers):
        for number in numbers:
            self.processes[number].kill()
        self.launcher.tick()

    def place(self, number):
        text = self.store.values.get(place_key(number, self.reports[number]))
        return text and Place(*json.loads(text))

    def ranks(self, *numbers):
        return [(place.rank, place.ranks) for place in map(self.place, numbers)]


@pytest.fixture
def four():
    """Four ranks at work, and a spare that waits."""
    training = Training(ranks=4, spares=1, restarts=1)
    training.report(0, 1, 2, 3)
    assert training.place(1) is None
    training.report(0, 4)
    assert training.ranks(1, 2, 3, 4) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    training.report(0, 5)
    assert training.place(5) is None
    return training


@pytest.mark.parametrize("dead", [1, 3])
def test_a_spare_takes_the_dead_ranks_place(four, dead):
    four.kill(dead)
    survivors = {1, 2, 3, 4} - {dead}
    first, *others = survivors
    four.report(7, *others)
    assert four.place(5) is None  # not all have reported
    four.report(8, first)
    place = four.place(5)
    assert (place.rank, place.ranks, place.generation) == (dead - 1, 4, 2)
    assert place.source == first - 1  # the furthest
    assert place.lacking == [rank for rank in range(4) if rank != first - 1]
    assert set(four.processes) == {1, 2, 3, 4, 5, 6}  # another one is started


def test_without_spares_the_group_shrinks():
    training = Training(ranks=3)
    training.report(0, 1, 2, 3)
    training.kill(2)
    training.report(5, 1, 3)
    assert training.ranks(1, 3) == [(0, 2), (1, 2)]
    assert training.place(1).lacking == []


def test_spares_that_come_later_fill_the_group(four):
    four.kill(1, 2)
    four.report(3, 3, 4)
    assert four.ranks(3, 4, 5) == [(1, 3), (2, 3), (0, 3)]
    four.report(0, 6)
    four.kill(5)
    four.report(4, 3, 4)
    assert four.ranks(3, 4, 6) == [(1, 3), (2, 3), (0, 3)]


def test_a_group_waits_for_spares_if_asked():
    training = Training(ranks=2, restarts=1, wait=60)
    training.report(0, 1, 2)
    training.kill(1)
    training.report(4, 2)
    assert training.place(2) is None
    training.report(0, 3)
    assert training.ranks(3, 2) == [(0, 2), (1, 2)]


def test_too_few_ranks_end_the_training():
    training = Training(ranks=2, min_ranks=2)
    training.report(0, 1, 2)
    training.kill(1)
    training.report(4, 2)
    assert training.place(2).end == "too few"


def test_an_error_without_a_loss_ends_the_training(four):
    four.report(3, 1, 2, 3, 4)
    assert [four.place(number).end for number in (1, 5)] == ["unchanged"] * 2


def test_the_training_ends_when_all_are_done(four):
    four.report(9, 1, 2, 3, done=True)
    assert four.place(1) is None
    four.report(9, 4, done=True)
    assert [four.place(number).end for number in (1, 4, 5)] == ["done"] * 3


def test_ranks_that_are_done_help_others(four):
    four.report(9, 1, 2, done=True)
    four.kill(4)
    four.report(8, 3)
    assert four.place(3).source == 0 and four.place(3).lacking == [2, 3]


@pytest.mark.parametrize(("state", "patience"), [(STOPPED, 60.0), (ALIVE, 0.0)])
def test_a_stopped_or_late_rank_is_killed(monkeypatch, state, patience):
    monkeypatch.setattr(launcher, "state", lambda pid: state)
    training = Training(ranks=2, patience=patience)
    training.report(0, 1, 2)
    training.report(4, 1)
    training.launcher.tick()
    training.launcher.tick()
    assert training.processes[2].code == -9 and training.ranks(1) == [(0, 1)]


def test_a_busy_rank_has_time(monkeypatch):
    monkeypatch.setattr(launcher, "state", lambda pid: ALIVE)
    training = Training(ranks=2)
    training.report(0, 1, 2)
    training.report(4, 1)
    training.launcher.tick()
    assert training.processes[2].code is None and training.place(1) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("ranks", 0), ("min_ranks", 0), ("min_ranks", 3), ("spares", -1), ("wait", -1.0)],
)
def test_impossible_limits_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        LauncherLimits(**{"ranks": 2, name: value})


def test_saving_at_the_end_has_time(monkeypatch):
    monkeypatch.setattr(launcher, "state", lambda pid: ALIVE)
    training = Training(ranks=2, patience=0.0)
    training.report(0, 1, 2)
    training.report(9, 1, done=True)
    training.launcher.tick()
    assert training.processes[2].code is None and training.place(1) is None


@pytest.mark.parametrize(("code", "end"), [(0, "done"), (1, "lost")])
def test_spares_never_begin_anew(four, code, end):
    """All ranks leave the loop before the last step, or all fail."""
    for number in (1, 2, 3, 4):
        four.processes[number].code = code
    four.launcher.tick()
    assert four.place(5).end == end


@pytest.mark.parametrize(
    ("codes", "result"),
    [([0, 0, 0], 0), ([0, 1, 0], 1), ([0, 0, 1], 0)],
    ids=["no failure", "a rank fails", "a spare fails"],
)
def test_a_failure_after_the_last_step_counts(codes, result):
    training = Training(ranks=2, spares=1)
    training.report(0, 1, 2, 3)
    training.report(9, 1, 2, done=True)
    assert training.place(1).end == "done"
    for number, code in enumerate(codes, start=1):
        training.processes[number].code = code
    training.launcher._add = lambda: None  # `run` starts no more processes
    assert training.launcher.run() == result


def test_a_late_death_does_not_fail_the_run():
    training = Training(ranks=2)
    training.report(0, 1, 2)
    training.kill(2)
    training.report(9, 1, done=True)
    training.processes[1].code = 0
    training.launcher._add = lambda: None
    assert training.launcher.run() == 0
