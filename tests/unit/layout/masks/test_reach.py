"""The rows that ranks have for each other, against the tables of each pair of ranks."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Mask
from seqpar.core.arguments import as_int_array
from seqpar.layout.masks import reach
from seqpar.layout.masks.mask import UNLIMITED, slices_between
from seqpar.layout.masks.reach import AttentionSide
from tests.support.cases import cu_seqlens, layouts
from tests.support.mask_cases import disjoint_ranges
from tests.support.tiers import examples


@st.composite
def geometries(draw):
    """The geometries of queries and keys: of any layouts, in chunks, or with merged ranks."""
    cu, ranks = draw(cu_seqlens(60)), draw(st.integers(1, 7))
    layout = kv_layout = draw(layouts(cu, ranks))
    if draw(st.booleans()):
        kv_layout = draw(layouts(draw(cu_seqlens(60, len(cu) - 1)), ranks))
    elif draw(st.booleans()):
        layout = kv_layout = layout.chunked(draw(st.integers(1, 9)))
    size = draw(st.integers(1, 3))
    geometries = layout.geometry, kv_layout.geometry
    return geometries if size == 1 else tuple(x.merged_ranks(size) for x in geometries)


@st.composite
def masks(draw, queries, keys):
    """A band, with a prefix or without, or ranges."""
    kind = draw(st.sampled_from(["band", "prefix", "ranges"]))
    cu, kv_cu = queries.cu_seqlens.tolist(), keys.cu_seqlens.tolist()
    if kind == "ranges":
        return Mask.of_ranges(disjoint_ranges(draw(st.integers(0, 99)), cu, kv_cu))
    window = draw(st.tuples(st.integers(-1, 9), st.integers(-1, 9)))
    prefix = None
    if kind == "prefix":
        prefix = as_int_array("", [draw(st.integers(0, int(n))) for n in keys.lengths])
    return Mask.of(draw(st.booleans()), window, prefix, keys)


@pytest.mark.parametrize(("spans", "edges"), [(2**17, 2**16), (3, 3)])
@examples(20, 80)
@given(st.data())
def test_counts_are_those_of_pairwise_tables(spans, edges, data):
    queries, keys = data.draw(geometries())
    mask = data.draw(masks(queries, keys))
    rank = data.draw(st.integers(0, queries.ranks - 1))
    of_queries, of_keys = (
        make(queries, keys, mask) for make in (AttentionSide.of_queries, AttentionSide.of_keys)
    )
    own_queries, own_keys = queries.holdings[rank], keys.holdings[rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reach, "_BLOCK_SPANS", spans)
        patch.setattr(reach, "_BLOCK_EDGES", edges)
        sent_keys, sent_queries = of_keys.own_rows(own_keys), of_queries.own_rows(own_queries)
        received_keys = of_queries.their_rows(own_queries)
        received_queries = of_keys.their_rows(own_keys)
    for peer in range(queries.ranks):
        if peer == rank:
            continue
        to_peer = slices_between(queries, peer, keys, rank, mask)
        from_peer = slices_between(queries, rank, keys, peer, mask)
        assert sent_keys.counts[peer] == to_peer.key_rows
        assert received_keys[peer] == from_peer.key_rows
        assert sent_keys.are_ranges[peer] == (len(to_peer.sent_rows) == 1)
        rows = of_keys.own_ranges(own_keys, [queries.holdings[peer]])
        assert rows.tolist() == to_peer.sent_rows.tolist()
        to_peer = slices_between(queries, rank, keys, peer, mask, queries_travel=True)
        from_peer = slices_between(queries, peer, keys, rank, mask, queries_travel=True)
        assert sent_queries.counts[peer] == to_peer.query_rows
        assert received_queries[peer] == from_peer.query_rows
        assert sent_queries.are_ranges[peer] == (len(to_peer.sent_rows) == 1)
        rows = of_queries.own_ranges(own_queries, [keys.holdings[peer]])
        assert rows.tolist() == to_peer.sent_rows.tolist()


@pytest.mark.parametrize("rank", range(2))
def test_counts_of_very_long_own_rows(rank):
    """Counted by mirrored chunks in 32 bits if the other side is short, and by spans."""
    keys = Layout.contiguous(2**31 - 1, 2).geometry
    mirrored = Layout.zigzag(8, 2)
    listed = Layout.from_spans([map(tuple, mirrored.spans(r)) for r in range(2)], 8)
    counts = [
        AttentionSide.of_keys(layout.geometry, keys, Mask(UNLIMITED, 0)).own_rows(
            keys.holdings[rank]
        )
        for layout in (mirrored, listed)
    ]
    for x, y in zip(*counts, strict=True):
        assert (x == y).all()


@examples(15, 150)
@given(st.data())
def test_groups_reach_what_their_merged_ranks_reach(data):
    cu, size = data.draw(cu_seqlens(60)), data.draw(st.integers(1, 3))
    geometry = data.draw(layouts(cu, 2 * size)).geometry
    mask = data.draw(masks(geometry, geometry))
    whole = geometry.merged_ranks(size)
    for make in AttentionSide.of_queries, AttentionSide.of_keys:
        own = geometry.holdings[0]
        grouped = make(geometry, geometry, mask).own_rows(own, np.arange(2 * size) // size)
        merged = make(whole, whole, mask).own_rows(own)
        assert grouped.counts.tolist() == merged.counts.tolist()
        assert grouped.are_ranges.tolist() == merged.are_ranges.tolist()


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "spans"])
def test_time_does_not_grow_with_documents_elsewhere(kind):
    """4,096 ranks and 8,000 documents; a rank of a contiguous layout has two of them.

    A rank of a zigzag layout shares documents with others 18 million times. The limits, next to the
    time of as many additions on this machine, are 1 s and 0.05 s where these take 0.027 s.
    """
    lengths = np.random.default_rng(0).integers(64, 20_000, 8000)
    cu = np.r_[0, np.cumsum(lengths)]
    if kind == "spans":
        contiguous = Layout.contiguous(cu, 4096)
        layout = Layout.from_spans([contiguous.spans(rank) for rank in range(4096)], cu)
    elif kind == "contiguous":
        layout = Layout.contiguous(cu, 4096)
    else:
        layout = Layout.zigzag(cu, 4096)
    geometry, mask = layout.geometry, Mask(UNLIMITED, 0)
    side, own = AttentionSide.of_keys(geometry, geometry, mask), geometry.holdings[1000]
    side.own_rows(own)
    ones = np.ones(18_000_000, int)
    additions = least_seconds(lambda: ones.cumsum())
    seconds = least_seconds(lambda: (side.own_rows(own), side.their_rows(own)))
    assert seconds < additions * (37 if kind == "zigzag" else 1.8)


def least_seconds(call):
    """Return the CPU time of the fastest of three calls."""
    took = []
    for _ in range(3):
        start = time.process_time()
        call()
        took.append(time.process_time() - start)
    return min(took)
