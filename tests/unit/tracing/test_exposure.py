"""The exposed fraction of steps whose times are known, by a clock that only the steps move."""

import time

import pytest

import seqpar
from seqpar.comm.messages.comm import Comm
from seqpar.core.hooks import Hooks, hooks

STEADY = (25.0, 20.0, 10.0)  # whole, without communication, communication alone: half exposed


@pytest.fixture
def exposure(monkeypatch):
    """A function of the times of each round that returns `seqpar.exposure`; the first warms up."""

    def measure(*rounds):
        now, durations = [0.0], iter([seconds for times in rounds for seconds in times])

        def step():
            now[0] += next(durations)

        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        return seqpar.exposure(step, Comm("alone", 0, 1), rounds=len(rounds) - 1)

    return measure


def stalled(way, seconds=200.0):
    """A steady round but for one of its three ways, in which a packet was lost."""
    return tuple(usual + seconds * (i == way) for i, usual in enumerate(STEADY))


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("rounds", [3, 4, 5])
def test_a_stalled_round_does_not_change_the_fraction(exposure, way, rounds):
    found = exposure(STEADY, stalled(way), *[STEADY] * (rounds - 1))
    assert (found.total, found.without_communication, found.communication) == STEADY
    assert found.fraction == 0.5


def test_a_round_is_compared_with_itself(exposure):
    """The machine is busy from before the first round until the second ends, but for a moment."""
    busy = tuple(2 * seconds for seconds in STEADY)
    found = exposure(STEADY, (busy[0], *STEADY[1:]), busy, STEADY)
    assert (found.total, found.without_communication, found.communication) == (50, 20, 10)
    assert found.fraction == 0.5  # of the medians it would be 3
    assert found.fractions == [3.0, 0.5, 0.5]


def test_the_warm_up_does_not_count(exposure):
    assert exposure((900.0, 1.0, 500.0), STEADY).rounds == (STEADY,)


def test_no_run_is_replayed():
    observed = []
    seqpar.exposure(lambda: observed.append(hooks()), Comm("alone", 0, 1), rounds=1)
    assert len(observed) == 2 * 3 and Hooks() not in observed


def test_uneven_work_can_cost_more_than_communication_alone(exposure):
    """Each of two ranks has its long compute in another step, so that each waits for the other."""
    work, message = ((20.0, 1.0), (1.0, 20.0)), 1.0  # by rank, then step; a message ends each step
    whole = sum(max(both) + message for both in zip(*work, strict=True))
    found = exposure(*[(whole, max(map(sum, work)), 2 * message)] * 2)
    assert found.fraction == (42 - 21) / 2
