"""Tiles of a mesh against brute force over every pair of tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar.core.arguments import as_int_array
from seqpar.core.ranges import ranges, rows_before
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.softmax.queries.tiles import Tiles
from tests.support.cases import cu_seqlens, layouts, visible
from tests.support.mask_cases import disjoint_ranges
from tests.support.tiers import examples


def times_computed(layout, kv_layout, mask, shape):
    """How often each (query, key) pair of packed tokens is computed, on any rank of the mesh."""
    (rows, columns), count = shape, np.zeros((layout.tokens, kv_layout.tokens), int)
    tiles = Tiles(layout.geometry, kv_layout.geometry, mask, columns)
    for host in range(rows * columns):
        for guest in [host, *tiles.row(host)]:
            queries = layout.token_indices(guest).numpy()
            if guest != host:
                queries = queries[ranges(*tiles.query_rows(guest, host).T)]
            for source in [host, *tiles.column(host)]:
                keys = kv_layout.token_indices(source).numpy()
                if source != host:
                    keys = keys[ranges(*tiles.key_rows(source, host).T)]
                slices = tiles.slices(guest, source, host)
                assert (slices.query_rows, slices.key_rows) == (queries.size, keys.size)
                for i, (first, _) in enumerate(slices.q_rows):
                    for row, (a, b) in enumerate(zip(*slices.key_intervals(i), strict=True)):
                        seen = keys[slices.k_rows[i, 0] + np.arange(a, b)]
                        count[queries[first + row], seen] += 1
    return count


@examples(15, 80)
@given(st.data())
def test_every_visible_pair_is_in_one_tile(data):
    shape = data.draw(st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (3, 3)]))
    cu, ranks = data.draw(cu_seqlens(60)), shape[0] * shape[1]
    layout = kv_layout = data.draw(layouts(cu, ranks))
    if data.draw(st.booleans()):
        kv_layout = data.draw(layouts(data.draw(cu_seqlens(60, len(cu) - 1)), ranks))
    kv_cu, pairs = kv_layout.cu_seqlens.tolist(), None
    causal, window = data.draw(st.booleans()), data.draw(st.sampled_from([(-1, -1), (3, 1)]))
    if kv_layout is layout and data.draw(st.booleans()):
        pairs = disjoint_ranges(data.draw(st.integers(0, 99)), cu, tries=8)
        mask = Mask.of_ranges(pairs)
    else:
        prefix = as_int_array("", [n // 3 for n in np.diff(kv_cu)])
        mask = Mask.of(causal, window, prefix, kv_layout.geometry)
    prefix = None if pairs is not None else mask.prefix
    expected = visible(cu, kv_cu, causal, window, prefix, pairs)
    assert (times_computed(layout, kv_layout, mask, shape) == expected).all()


def test_only_rows_that_see_and_are_seen_travel():
    """Of a window of 8 keys, on 2 x 2 ranks of 100 contiguous tokens: the first queries of each
    rank see the last keys of the one before, which is in its row or in the row above."""
    geometry = Layout.contiguous(400, 4).geometry
    tiles = Tiles(geometry, geometry, Mask(8, 0), columns=2)
    assert tiles.query_rows(1, 0).tolist() == tiles.query_rows(3, 2).tolist() == [[0, 8]]
    assert tiles.query_rows(2, 3).tolist() == [[0, 8]]  # of which the keys go down, from 1 to 3
    assert tiles.key_rows(1, 3).tolist() == [[92, 100]]
    assert (
        not len(tiles.query_rows(0, 1))
        and not len(tiles.key_rows(0, 2))
        and not len(tiles.key_rows(3, 1))
    )


def test_causal_zigzag_tiles_are_equal():
    geometry = Layout.zigzag(960, 6).geometry
    tiles = Tiles(geometry, geometry, Mask(2**40, 0), columns=3)
    areas = [
        sum(tiles.area(q, k) for q in [r, *tiles.row(r)] for k in [r, *tiles.column(r)])
        for r in range(6)
    ]
    assert max(areas) <= 1.01 * min(areas) and sum(areas) == 960 * 961 // 2


@pytest.mark.parametrize("chosen", [[], [[0, 3]], [[2, 4], [7, 9], [9, 12]]])
def test_rows_before_counts_what_is_chosen(chosen):
    table, rows = np.array(chosen, np.int64).reshape(-1, 2), np.arange(15)
    expected = [(ranges(*table.T) < row).sum() for row in rows]
    assert rows_before(table, rows).tolist() == expected
