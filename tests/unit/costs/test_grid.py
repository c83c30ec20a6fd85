"""The grid: exact where times are bilinear, monotone everywhere, and near what devices take."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.costs.devices import H100_CAUSAL, NODES, published_grid
from seqpar.costs.grid import Grid, Tasks, bilinear, causal_pairs, slice_tasks, span_tasks
from seqpar.layout.masks.mask import Mask, slices_between
from tests.support.cases import layouts

NODES_X, NODES_Y = np.array([1.0, 4.0, 16.0]), np.array([2.0, 8.0])


def affine(call=1e-4, row=1e-6, pair=1e-8, fused=False, **changes):
    """A grid of a device whose calls take so much, each row so much, and each pair."""
    rows, keys = np.array([64.0, 1024.0, 8192.0]), np.array([64.0, 512.0, 4096.0])
    table = call + rows[:, None] * (row + pair * keys)
    back = 2 * table
    fields = {"heads": 8, "head_dim": 64, "edge": 0.0, "tile": 1} | changes
    calls = (call, 2 * call)
    return Grid(rows, keys, table, back, 3 * table, 3 * back, call=calls, fused=fused, **fields)


def test_bilinear_is_exact_on_planes_and_between():
    table = 1 + 2 * NODES_X[:, None] + 3 * NODES_Y + 5 * NODES_X[:, None] * NODES_Y
    x, y = np.meshgrid(np.linspace(1, 16, 31), np.linspace(2, 8, 13))
    expected = 1 + 2 * x + 3 * y + 5 * x * y
    np.testing.assert_allclose(bilinear(NODES_X, NODES_Y, table, x, y), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (16, 8, 7.0),  # a node
        (32, 8, 14.0),  # beyond the last row: in proportion
        (32, 24, 42.0),  # beyond both
        (0.5, 2, 1.0),  # below the first: no less
        (1, 0.1, 1.0),
        (2.5, 5, 2.5),  # the middle of a cell: the mean of its corners
    ],
)
def test_points_on_between_and_beyond_nodes(x, y, expected):
    table = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]])
    assert bilinear(NODES_X, NODES_Y, table, np.array(x), np.array(y)) == pytest.approx(expected)


def test_affine_devices_give_exact_task_times():
    grid, tasks = affine(), Tasks.of([100, 3000, 8192], [700, 3000, 4096], [70000, 4501500, 2**25])
    expected = 1e-4 + tasks.rows * 1e-6 + tasks.pairs * 1e-8
    np.testing.assert_allclose(grid.alone(tasks, 8, 64), expected)
    np.testing.assert_allclose(grid.alone(tasks, 8, 64, backward=True), 2 * expected)
    np.testing.assert_allclose(grid.work(tasks, 8, 64), expected - 1e-4)
    # twice the heads and half the head dim: as much work, and one call
    np.testing.assert_allclose(grid.alone(tasks, 16, 32), expected)
    np.testing.assert_allclose(grid.alone(tasks, 16, 64), 2 * expected - 1e-4)


def test_windows_have_a_table_of_their_own():
    """And a task that is a window's in part costs something between."""
    grid = affine()
    full, half, window = grid.alone(Tasks.of(1000, 1255, 256000, [0.0, 0.5, 1.0]), 8, 64)
    assert (half, window) == pytest.approx((2 * full, 3 * full))


@pytest.mark.parametrize(
    ("rows", "keys", "pairs", "extra"),
    [
        (64, 64, 64 * 65 // 2, 64 * 63 // 2),  # a small causal square: all of it is computed
        (1000, 1000, 500500, 1000 * 100),  # a large one: 100 keys more a row
        (1000, 3000, 2500500, 1000 * 100),  # behind other keys
        (1000, 1000, 10**6, 0),  # full
    ],
)
def test_the_edge_of_a_causal_task_costs_keys(rows, keys, pairs, extra):
    grid, task = affine(edge=100.0), Tasks.of(rows, keys, pairs)
    expected = 1e-4 + rows * 1e-6 + (pairs + extra) * 1e-8
    assert grid.alone(task, 8, 64) == pytest.approx(expected, rel=1e-3)


def test_several_tasks_in_a_call_share_its_cost():
    grid, tasks = affine(), Tasks.of([100, 200, 400, 0], [100, 200, 100, 0], [100, 300, 500, 0])
    alone = grid.alone(tasks, 8, 64)
    assert alone[3] == 0
    together = grid.together(tasks, 8, 64, owner=[2, 2, 0, 1], owners=4)
    np.testing.assert_allclose(together, [alone[2], 0, alone[0] + alone[1] - 1e-4, 0])


def test_small_tasks_that_are_fused_share_the_device():
    """A task of few rows keeps most of an H100 idle: 64 of them take far less than 64 calls, and
    one among others no less than alone."""
    grid, small = published_grid(), Tasks.of(np.full(64, 128), 128, 128 * 129 / 2)
    together = grid.together(small, 64, 128)[0]
    assert together < grid.alone(small, 64, 128).sum() / 3
    long = Tasks.of(128, 2**18, 2**25)
    assert grid.together(long, 64, 128)[0] == grid.alone(long, 64, 128)
    rate = 4 * 64 * 128 * 8192**2 / 2  # FLOPs of 8 K tokens, in documents of 1 K or as one
    of_one = rate / grid.together(Tasks.of(8192, 8192, 8192 * 8193 / 2), 64, 128)[0]
    packed = Tasks.of(np.full(8, 1024), 1024, 1024 * 1025 / 2)
    of_eight = rate / 8 / grid.together(packed, 64, 128)[0]
    assert 0.5 * of_one < of_eight < of_one


@pytest.mark.parametrize("tokens", H100_CAUSAL)
def test_published_times_are_nodes_of_the_h100s_grid(tokens):
    task = Tasks.of(tokens, tokens, tokens * (tokens + 1) / 2)
    grid = NODES["h100"].device.attention
    assert grid.alone(task, 64, 128) == pytest.approx(H100_CAUSAL[tokens])
    assert grid.alone(task, 64, 128, backward=True) == pytest.approx(
        2.58 * H100_CAUSAL[tokens], 1e-2
    )


def test_beyond_the_grid_an_h100_is_saturated():
    grid, tokens = published_grid(), 2**21
    task = Tasks.of(tokens, tokens, tokens * (tokens + 1) / 2)
    rate = 4 * 64 * 128 * task.pairs / grid.alone(task, 64, 128)
    assert rate == pytest.approx(341e12, rel=0.01)


TASKS = st.tuples(st.integers(1, 10**5), st.integers(1, 10**6), st.floats(0.01, 1))


@pytest.mark.parametrize("grid", [published_grid(), affine(edge=50.0), affine(fused=True)])
@given(
    tasks=st.lists(TASKS, min_size=1, max_size=4), more=st.integers(0, 3), backward=st.booleans()
)
def test_more_work_never_takes_less(grid, tasks, more, backward):
    """More keys, more pairs, or one task more; calls are never negative, nor less than one task."""
    rows, keys, share = np.array(tasks).T
    first = Tasks.of(rows, keys, np.floor(rows * keys * share))
    wider = Tasks.of(rows, 2 * keys, first.pairs + keys)
    fewer = Tasks.of(rows[: more + 1], keys[: more + 1], first.pairs[: more + 1])
    of_fewer, of_first, of_wider = (
        grid.together(x, 32, 128, backward)[0] * (1 + 1e-9) for x in (fewer, first, wider)
    )
    alone = grid.alone(first, 32, 128, backward)
    assert 0 <= of_fewer <= of_first * (1 + 1e-9) and (alone <= of_first).all()
    assert (grid.work(first, 32, 128, backward) >= 0).all()
    if grid.edge == 0:  # else a task that is less full may cost more at its edge
        assert of_first <= of_wider * (1 + 1e-9)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_pairs_of_spans_match_counting(window):
    for start in range(12):
        for stop in range(start, 12):
            seen = [i + 1 if window is None else min(i + 1, window) for i in range(start, stop)]
            assert causal_pairs(start, stop, window) == sum(seen)


@given(data=st.data(), window=st.sampled_from([None, 1, 5, 40]))
def test_spans_and_slices_are_the_same_tasks(data, window):
    """Where each rank holds whole documents."""
    cu = np.r_[0, np.cumsum(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5)))]
    geometry = Layout.contiguous(cu, 1).geometry
    mask = Mask.of(True, (-1 if window is None else window - 1, -1), None, geometry)
    slices = slice_tasks(slices_between(geometry, 0, geometry, 0, mask))
    spans = span_tasks(0, np.diff(cu), window)
    for field in dataclasses.fields(Tasks):
        np.testing.assert_array_equal(getattr(slices, field.name), getattr(spans, field.name))


@given(data=st.data(), layout=layouts([0, 30, 47, 90], 3), window=st.sampled_from([-1, 0, 7]))
def test_slices_tasks_have_the_area_of_the_slices(data, layout, window):
    geometry = layout.geometry
    mask = Mask.of(True, (window, -1), None, geometry)
    ranks = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    slices = slices_between(geometry, ranks[0], geometry, ranks[1], mask)
    assert slice_tasks(slices).pairs.sum() == slices.area


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Tasks.of(-1, 1, 0), "rows must be at least 0"),
        (lambda: Tasks.of(2, 3, 7), "pairs"),
        (lambda: Tasks.of(2, 3, 6, 1.5), "windowed"),
        (lambda: causal_pairs(3, 2), "starts"),
        (lambda: affine(heads=0), "heads"),
        (lambda: affine(heads=1.5), "heads must be an integer"),
        (lambda: affine(head_dim=np.inf), "head_dim"),
        (lambda: affine(tile=np.nan), "tile"),
        (lambda: affine(fused="no"), "fused"),
        (lambda: affine(edge=-1.0), "edge"),
        (lambda: affine(edge=np.nan), "edge"),
        (lambda: affine(call=np.inf), "seconds"),
        (lambda: dataclasses.replace(affine(), call=(0.0, np.nan)), "call"),
        (lambda: dataclasses.replace(affine(), call=(0.0, "1")), "call"),
        (lambda: dataclasses.replace(affine(), rows=[1.0, 2.0, np.inf]), "rows"),
        (lambda: dataclasses.replace(affine(), keys=[1.0, np.nan, 3.0]), "keys"),
        (lambda: dataclasses.replace(affine(), forward=np.full((3, 3), np.inf)), "forward"),
        (lambda: dataclasses.replace(affine(), rows=[3.0, 2.0, 1.0]), "rows"),
        (lambda: dataclasses.replace(affine(), forward=[[1.0]]), "forward"),
        (lambda: affine().together(Tasks.of([1], 1, 1), 8, 64, owner=[4], owners=4), "owner"),
    ],
)
def test_what_is_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()
