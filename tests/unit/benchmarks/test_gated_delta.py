"""The cost model of Gated DeltaNet: it counts what is computed and sent."""

import pytest

from benchmarks.papers import gated_delta
from benchmarks.papers.gated_delta import CLUSTER, DIM, HEADS, ROWS, by_heads, by_maps, work

CHUNK = 64  # rows that the backend computes together


def test_flops_are_those_of_chunks():
    """Scores of queries and of keys, their sums, and the triangular system; then what is read of
    states and written to them. Maps need a sweep of states and one of transitions besides."""
    within = 6 * CHUNK**2 * DIM + CHUNK**2 * 2 * DIM
    states, maps = 6 * CHUNK * DIM**2, 8 * CHUNK * DIM**2
    chunks = ROWS // CHUNK
    assert sum(work("forward", False)) == chunks * (within + states)
    assert sum(work("forward", True)) == chunks * (within + states + maps)
    assert 1 < gated_delta.more("backward") < gated_delta.more("forward")


def test_the_busiest_device_receives_two_maps_and_state():
    state = HEADS * DIM**2 * 4
    for direction in gated_delta.BOTH:
        assert gated_delta.gathered(direction) == pytest.approx(gated_delta.moved(5 * state))


def test_exchanging_heads_costs_messages_and_maps_cost_work():
    alone = gated_delta.ALONE["forward"] / gated_delta.RANKS
    rows = gated_delta.TOKENS // gated_delta.RANKS * HEADS * 2 * 3 / 4  # bytes of a gate
    sent = (4 * DIM + 2) * rows / CLUSTER.inside.rate + 6 * CLUSTER.inside.latency
    assert by_heads("forward") == pytest.approx(alone + 1e3 * sent)
    part = work("forward", True)
    hidden = alone * part.within / sum(work("forward", False))
    assert hidden < gated_delta.gathered("forward")  # what is not hidden is added
    expected = alone * gated_delta.more("forward") + gated_delta.gathered("forward") - hidden
    assert by_maps("forward") == pytest.approx(expected)
