"""Masks and their tables against brute force over every pair of tokens, sharing no code with the
library's geometry."""

import time
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar.core.arguments import as_int_array
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask, slices_between, slices_over
from tests.support.cases import cu_seqlens, layouts, visible
from tests.support.tiers import examples


def pairs(layout, kv_layout, own, peer, mask, queries_travel):
    """How often each (query, key) pair of packed tokens stands in the slices of own's queries over
    peer's keys."""
    slices = slices_between(layout.geometry, own, kv_layout.geometry, peer, mask, queries_travel)
    count = np.zeros((layout.tokens, kv_layout.tokens), dtype=int)
    sent = np.concatenate([np.arange(*rows) for rows in slices.sent_rows] or [np.arange(0)]).astype(
        int
    )
    q_index, k_index = layout.token_indices(own).numpy(), kv_layout.token_indices(peer).numpy()
    if queries_travel and own != peer:
        q_index = q_index[sent]
    else:
        k_index = k_index[sent]
    q_seen, k_seen = np.zeros(slices.query_rows, dtype=bool), np.zeros(slices.key_rows, dtype=bool)
    for i in range(len(slices)):
        start, stop = slices.key_intervals(i)
        assert slices.pairs[i] == ((stop - start).sum(), (stop - start)[start > 0].sum())
        for row, (a, b) in enumerate(zip(start, stop, strict=True), slices.q_rows[i, 0]):
            keys = slices.k_rows[i, 0] + np.arange(a, b)
            count[q_index[row], k_index[keys]] += 1
            k_seen[keys] = True
            q_seen[row] |= b > a
    assert own == peer or (q_seen if queries_travel else k_seen).all(), (
        "a row would be sent for nothing"
    )
    assert slices.area == count.sum()
    return count


@examples(12, 100)
@given(st.data())
def test_slices_are_exactly_the_visible_pairs(data):
    cu = data.draw(cu_seqlens(max_tokens=24))
    ranks = data.draw(st.integers(1, 4))
    layout = data.draw(layouts(cu, ranks))
    kv_cu = data.draw(st.one_of(st.just(cu), cu_seqlens(max_tokens=24, documents=len(cu) - 1)))
    kv_layout = data.draw(layouts(kv_cu, ranks))
    causal, window = (
        data.draw(st.booleans()),
        data.draw(st.tuples(st.integers(-1, 9), st.integers(-1, 9))),
    )
    lengths = np.diff(kv_cu)
    prefix = data.draw(st.one_of(st.none(), st.tuples(*[st.integers(0, int(n)) for n in lengths])))
    mask = Mask.of(
        causal,
        window,
        None if prefix is None else as_int_array("prefix", prefix),
        kv_layout.geometry,
    )
    for queries_travel in (False, True):
        table = (
            pairs(layout, kv_layout, *pair, mask, queries_travel)
            for pair in np.ndindex(ranks, ranks)
        )
        np.testing.assert_array_equal(sum(table), visible(cu, kv_cu, causal, window, prefix))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_tables_grow_with_documents_and_peers_only(kind):
    """Doubling the tokens leaves the number of slices alone; the tables of 4,096 documents on 64
    ranks are quick."""
    make = {"striped": lambda cu: Layout.striped(cu, 64, stripe=1)}.get(
        kind, lambda cu: getattr(Layout, kind)(cu, 64)
    )
    counts = {}
    for documents, length in [(64, 256), (64, 512), (128, 256)]:
        layout = make(np.arange(documents + 1) * length)
        tables = [
            slices_between(layout.geometry, 40, layout.geometry, peer, Mask(2**40, 0))
            for peer in range(64)
        ]
        counts[documents, length] = sum(len(table) for table in tables)
        assert counts[documents, length] <= documents * 64
    assert counts[64, 512] == counts[64, 256]
    assert abs(counts[128, 256] - 2 * counts[64, 256]) <= 64
    layout = make(np.arange(4097) * 256)
    start = time.process_time()
    for peer in range(64):
        slices_between(layout.geometry, 40, layout.geometry, peer, Mask(2**40, 0))
        slices_between(layout.geometry, peer, layout.geometry, 40, Mask(2**40, 0))
    assert time.process_time() - start < 1.0


def test_tables_of_many_prefixes_are_freed():
    layout = Layout.zigzag([0, 60, 200], 2)
    geometry, alive = layout.geometry, weakref.WeakSet()
    for prefix in range(60):
        mask = Mask.of(True, (-1, -1), np.array([prefix, 0]), geometry)
        alive.update(slices_between(geometry, 0, geometry, peer, mask) for peer in range(2))
        alive.add(slices_over(geometry, 0, geometry, (1, 0), mask))
    assert len(alive) <= 3 * 32
    assert slices_between(geometry, 0, geometry, 1, mask) in alive
