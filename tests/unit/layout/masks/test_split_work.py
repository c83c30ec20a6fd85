"""Two halves of slices: together they are all of them, and of a long one each is half the work."""

import numpy as np
import pytest
import torch

from seqpar import Layout
from seqpar.layout.handle import from_handle
from seqpar.layout.masks.mask import Mask, _middle, _row, halves, slices_between
from tests.support.tiers import few_rows

DOCUMENTS = [0, 700, 701, 701, 1500, 1600]
LAYOUTS = {
    "one document": Layout.zigzag(2048, 2),
    "contiguous": Layout.contiguous(DOCUMENTS, 2),
    "zigzag": Layout.zigzag(DOCUMENTS, 2),
    "striped": Layout.striped(DOCUMENTS, 2, stripe=16),
    "one token each": Layout.contiguous(list(range(9)), 2),
    "nothing": Layout.from_spans([[], [(0, 0, 4)]], [0, 4]),
}
WINDOWS = {"causal": (-1, 0), "full": (-1, -1), "window": (100, 0), "both ways": (60, 30)}


def seen(slices):
    """(query rows, key rows): how many slices have each pair that see each other."""
    count = np.zeros((slices.query_rows, slices.key_rows), dtype=int)
    for q, k, band in zip(slices.q_rows, slices.k_rows, slices.bands, strict=True):
        rows, keys = slice(*q), slice(*k)
        count[rows, keys] += slices.mask(rows, keys, band, torch.device("cpu")).numpy()
    return count


def edges_see(slices):
    """Whether the first and last rows of each slice see a key, and its first and last keys are
    seen: kernels count on it."""
    intervals = map(slices.key_intervals, range(len(slices)))
    keys = (slices.k_rows[:, 1] - slices.k_rows[:, 0]).tolist()
    return all(
        start[0] == 0 and stop[0] > 0 and start[-1] < stop[-1] == count
        for (start, stop), count in zip(intervals, keys, strict=True)
    )


@few_rows()
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_are_disjoint_and_all(layout, window):
    geometry = from_handle(LAYOUTS[layout]._handle)
    mask = Mask.of(False, WINDOWS[window], None, geometry)
    for rank in range(2):
        slices = slices_between(geometry, rank, geometry, rank, mask)
        first, last = halves(slices)
        assert np.array_equal(seen(first) + seen(last), seen(slices))
        for part in (first, last):
            assert (part.q_rows[:, 1] > part.q_rows[:, 0]).all()
            assert (part.k_rows[:, 1] > part.k_rows[:, 0]).all()
            assert edges_see(part)
        uneven = abs(first.area - last.area)  # of each slice at most two tiles
        assert uneven <= len(slices) * 2 * 128 * int(seen(slices).sum(1).max(initial=0))


def test_halves_begin_and_end_with_visible_rows():
    queries = from_handle(Layout.contiguous(12, 1)._handle)
    spans = [[(0, 0, 1), (0, 4, 5), (0, 7, 9), (0, 11, 12)], [(0, 1, 4), (0, 5, 7), (0, 9, 11)]]
    keys = from_handle(Layout.from_spans(spans, 12)._handle)
    for window in ((0, 0), (1, 0), (1, 1), (2, 0), (0, 3)):
        slices = slices_between(queries, 0, keys, 0, Mask.of(False, window, None, keys))
        parts = halves(slices)
        assert np.array_equal(sum(map(seen, parts)), seen(slices))
        assert edges_see(slices) and all(map(edges_see, parts)), window


def test_a_long_slice_is_cut_between_tiles():
    geometry = from_handle(LAYOUTS["one document"]._handle)
    mask = Mask.of(True, (-1, -1), None, geometry)
    first, last = halves(slices_between(geometry, 0, geometry, 0, mask))
    (row,) = {int(first.q_rows.max()), int(last.q_rows.min())}
    assert row % 128 == 0 and 0 < row < 1024
    assert 0.4 < first.area / (first.area + last.area) < 0.6


def test_full_slices_are_cut_as_others():
    for keys in (1, 7):
        rows = [_row(np.zeros(n, int), np.full(n, keys)) for n in range(2, 1100)]
        assert _middle(np.arange(2, 1100)).tolist() == rows


def test_short_slices_stay_whole():
    """Backward computes them as forward does, so their scores have the same bits."""
    geometry = from_handle(Layout.contiguous([0, 32, 65], 1)._handle)
    first, last = halves(
        slices_between(geometry, 0, geometry, 0, Mask.of(True, (-1, -1), None, geometry))
    )
    assert first.q_rows.tolist()[0] == [0, 32] and len(first) == 2
    assert len(last) == 1 and last.q_rows[0, 0] > 32
