"""Stages of a pipeline, against what is worked out by hand."""

import numpy as np
import pytest

from seqpar import simulate
from tests.unit.simulate.playback.test_play import cluster

FAST = {"latency": 0.0, "rate": 1e30}


def run(forward, backward, stages, nbytes=0, ranks=None, schedule="1f1b", **on):
    on = cluster(devices=ranks or stages, **(FAST | on))
    return simulate.pipeline(forward, backward, on, nbytes, stages=stages, schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(1, 1), (1, 3), (2, 1), (4, 3), (4, 4), (3, 9)])
def test_equal_stages_give_the_known_pipeline_time(stages, count, schedule):
    outcome = run([2.0] * count, [3.0] * count, stages, schedule=schedule)
    assert outcome.seconds == pytest.approx((count + stages - 1) * 5.0)
    assert outcome.busy.tolist() == [count * 5.0] * stages


def test_a_slow_stage_is_the_pace_of_all():
    """Three times as slow as the others: theirs come once before its first, and once behind."""
    forward, backward = np.full((3, 8), 1.0), np.full((3, 8), 2.0)
    forward[1], backward[1] = 3.0, 6.0
    assert run(forward, backward, 3).seconds == pytest.approx(1.0 + 8 * 9.0 + 2.0)
    # of the last stage backward follows forward at once; the first's are at both ends
    assert run(forward[[0, 2, 1]], backward[[0, 2, 1]], 3).seconds == pytest.approx(2 + 72 + 4)


def most_held(outcome, rank):
    """How many micro-batches a rank has between forward and backward, at most."""
    held = most = 0
    for event in outcome.trace.events:
        if event.rank == rank and event.kind == "compute":
            held += 1 if event.what == "stage forward" else -1
            most = max(most, held)
    return most


def test_a_stage_holds_the_known_micro_batches():
    outcome = run([1.0] * 9, [2.0] * 9, 4)
    assert [most_held(outcome, rank) for rank in range(4)] == [4, 3, 2, 1]
    outcome = run([1.0] * 9, [2.0] * 9, 4, schedule="gpipe")
    assert [most_held(outcome, rank) for rank in range(4)] == [9] * 4


def test_what_is_passed_on_takes_the_link():
    """One micro-batch goes through three stages and back: 4 messages of 10 bytes, each 1 + 10."""
    outcome = run([2.0], [3.0], 3, nbytes=10, latency=1.0, rate=1.0)
    assert outcome.seconds == pytest.approx(3 * 5.0 + 4 * 11.0)
    assert outcome.sent_bytes.tolist() == [10, 20, 10]
    assert run([2.0], [3.0], 3, latency=1.0).seconds == pytest.approx(15.0 + 4.0)


def test_ranks_of_a_stage_share_their_nodes_nics():
    """Two stages of two ranks, a node each: both pass on at once, through one NIC or two."""
    for nics, each in ((1, 20.0), (2, 10.0)):
        on = cluster(nodes=2, devices=2, nics=nics)
        outcome = simulate.pipeline([2.0], [3.0], on, 10, stages=2)
        assert outcome.seconds == pytest.approx(10.0 + 2 * each)


def test_cores_that_pass_on_do_not_compute_meanwhile():
    """A message takes a core at both ends: 2 stages with 2 micro-batches, of which none hides."""
    hidden = run([2.0] * 2, [3.0] * 2, 2, nbytes=1, rate=1.0, overlaps=True)
    exposed = run([2.0] * 2, [3.0] * 2, 2, nbytes=1, rate=1.0, overlaps=False)
    assert hidden.seconds < exposed.seconds


def test_uneven_micro_batches_wait_for_each_other():
    """In two stages: the second begins the long one when the first ends it, and so on."""
    outcome = run([1.0, 4.0], [2.0, 8.0], 2)
    # stage 0: F0 0-1, F1 1-5, B0 .. ; stage 1: F0 1-2, B0 2-4, F1 5-9, B1 9-17; stage 0: B1 17-25
    assert outcome.seconds == pytest.approx(25.0)


ONE = [1.0]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [
    ((ONE, ONE), {"stages": 3}, ValueError, "stages must divide the cluster's 4 ranks, got 3"),
    ((ONE, ONE), {"stages": 0}, ValueError, "stages"),
    ((ONE, ONE), {"stages": 2, "schedule": "zb"}, ValueError, "schedule"),
    (([], []), {"stages": 2}, ValueError, "forward"),
    (([[1.0]] * 3, ONE), {"stages": 2}, ValueError, "forward"),
    ((ONE, [1.0, 2.0]), {"stages": 2}, ValueError, "backward must have forward's 1"),
    (([-1.0], ONE), {"stages": 2}, ValueError, "forward must be at least 0"),
    ((ONE, ONE, [1, 2]), {"stages": 2}, ValueError, "nbytes"),
    ((ONE, ONE, np.inf), {"stages": 2}, ValueError, "nbytes must be finite"),
    (([np.inf], ONE), {"stages": 2}, ValueError, "forward must be finite"),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments, options, error, message):
    forward, backward, *nbytes = arguments
    with pytest.raises(error, match=message):
        simulate.pipeline(forward, backward, cluster(devices=4), *nbytes, **options)
    with pytest.raises(TypeError, match="cluster"):
        simulate.pipeline(ONE, ONE, 4, stages=1)
