"""Layout and Mask against brute force over every pair of tokens, sharing no code with the library's geometry."""

import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.geometry import as_int_array
from seqpar.layout import Layout, Span
from seqpar.mask import Mask, slices_between
from tests.cases import cu_seqlens, layouts, visible


def pairs(layout, kv_layout, own, peer, mask, queries_travel):
    """How often each (query, key) pair of packed tokens stands in the slices of own's queries over peer's keys."""
    slices = slices_between(layout.geometry, own, kv_layout.geometry, peer, mask, queries_travel)
    count = np.zeros((layout.tokens, kv_layout.tokens), dtype=int)
    sent = np.concatenate([np.arange(*rows) for rows in slices.sent_rows] or [np.arange(0)]).astype(int)
    q_index, k_index = layout.token_indices(own).numpy(), kv_layout.token_indices(peer).numpy()
    if queries_travel and own != peer:
        q_index = q_index[sent]
    else:
        k_index = k_index[sent]
    q_seen, k_seen = np.zeros(slices.queries, dtype=bool), np.zeros(slices.keys, dtype=bool)
    for i in range(len(slices)):
        start, stop = slices.visible(i)
        for row, (a, b) in enumerate(zip(start, stop, strict=True), slices.q_rows[i, 0]):
            keys = slices.k_rows[i, 0] + np.arange(a, b)
            count[q_index[row], k_index[keys]] += 1
            k_seen[keys] = True
            q_seen[row] |= b > a
    assert own == peer or (q_seen if queries_travel else k_seen).all(), "a row would be sent for nothing"
    assert slices.area == count.sum()
    return count


@given(st.data())
def test_slices_are_exactly_the_visible_pairs(data):
    cu = data.draw(cu_seqlens(max_tokens=24))
    ranks = data.draw(st.integers(1, 4))
    layout = data.draw(layouts(cu, ranks))
    kv_cu = data.draw(st.one_of(st.just(cu), cu_seqlens(max_tokens=24, documents=len(cu) - 1)))
    kv_layout = data.draw(layouts(kv_cu, ranks))
    causal, window = data.draw(st.booleans()), data.draw(st.tuples(st.integers(-1, 9), st.integers(-1, 9)))
    lengths = np.diff(kv_cu)
    prefix = data.draw(st.one_of(st.none(), st.tuples(*[st.integers(0, int(n)) for n in lengths])))
    mask = Mask.of(causal, window, None if prefix is None else as_int_array("prefix", prefix), kv_layout.geometry)
    for queries_travel in (False, True):
        table = (pairs(layout, kv_layout, *pair, mask, queries_travel) for pair in np.ndindex(ranks, ranks))
        np.testing.assert_array_equal(sum(table), visible(cu, kv_cu, causal, window, prefix))


@given(st.data())
def test_layout_holds_every_token_once_in_order(data):
    cu = data.draw(cu_seqlens(max_tokens=60))
    ranks = data.draw(st.integers(1, 5))
    layout = data.draw(layouts(cu, ranks))
    x = torch.arange(cu[-1])
    parts = [layout.shard(x, rank) for rank in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(cu[-1]))
    for rank, part in enumerate(parts):
        assert part.tolist() == sorted(part.tolist()) == layout.token_indices(rank).tolist()
        documents = np.searchsorted(cu, part.numpy(), side="right") - 1
        assert layout.position_ids(rank).tolist() == (part.numpy() - np.array(cu)[documents]).tolist()
        expanded = [cu[s.document] + i for s in layout.spans(rank) for i in range(s.start, s.stop)]
        assert expanded == part.tolist() and layout.tokens_on(rank) == len(part)
    again = Layout.from_spans([list(reversed(layout.spans(rank))) for rank in range(ranks)], cu)
    assert again.geometry.digest == layout.geometry.digest == pickle.loads(pickle.dumps(layout)).geometry.digest


def test_layouts_by_example():
    assert [Layout.contiguous(7, 2).spans(r) for r in range(2)] == [[Span(0, 0, 3)], [Span(0, 3, 7)]]
    zigzag = Layout.zigzag([0, 8, 11], 2)
    assert zigzag.spans(0) == [Span(0, 0, 2), Span(0, 6, 8), Span(1, 2, 3)]
    assert zigzag.spans(1) == [Span(0, 2, 6), Span(1, 0, 2)]
    striped = Layout.striped(10, 2, stripe=3)
    assert striped.spans(0) == [Span(0, 0, 3), Span(0, 6, 9)] and striped.spans(1) == [Span(0, 3, 6), Span(0, 9, 10)]
    assert Layout.contiguous(2, 4).spans(0) == [] and Layout.contiguous(0, 2).tokens == 0
    assert "tokens=8" in repr(Layout.zigzag(torch.tensor([0, 3, 8]), 2))
    assert zigzag.cu_seqlens.tolist() == [0, 8, 11] and zigzag.ranks == 2


def test_labels_stop_at_the_end_of_a_document():
    ids = torch.tensor([5, 6, 7, 8, 9])
    assert seqpar.shift_labels(ids, [0, 3, 3, 5]).tolist() == [6, 7, -100, 9, -100]
    assert seqpar.shift_labels(ids.expand(2, 5), 5).tolist() == [[6, 7, 8, 9, -100]] * 2


def test_shard_is_differentiable():
    layout = Layout.zigzag([0, 3, 8], 2)
    x = torch.arange(16.0).reshape(2, 8).requires_grad_()
    layout.shard(x, 1, dim=-1).sum().backward()
    expected = torch.zeros(2, 8)
    expected[:, layout.token_indices(1)] = 1
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_tables_grow_with_documents_and_peers_only(kind):
    """Doubling the tokens leaves the number of slices alone; the tables of 4,096 documents on 64 ranks are quick."""
    make = {"striped": lambda cu: Layout.striped(cu, 64, stripe=1)}.get(kind, lambda cu: getattr(Layout, kind)(cu, 64))
    counts = {}
    for documents, length in [(64, 256), (64, 512), (128, 256)]:
        layout = make(np.arange(documents + 1) * length)
        tables = [slices_between(layout.geometry, 40, layout.geometry, peer, Mask(2**40, 0)) for peer in range(64)]
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


def test_tables_are_owned_by_the_layout():
    layout = Layout.zigzag(64, 2)
    first = slices_between(layout.geometry, 0, layout.geometry, 1, Mask(3, 0))
    assert slices_between(layout.geometry, 0, layout.geometry, 1, Mask(3, 0)) is first
    kv_layout = Layout.zigzag(32, 2)
    slices_between(layout.geometry, 0, kv_layout.geometry, 1, Mask(3, 0))
    assert len(layout.geometry.tables) == 2
    del kv_layout
    assert len(layout.geometry.tables) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.zigzag([1, 4], 2), "cu_seqlens must start at 0, got \\[1\\]"),
        (lambda: Layout.zigzag([], 2), "cu_seqlens must start at 0"),
        (lambda: Layout.zigzag([0, 4, 3], 2), "cu_seqlens must not decrease, got 4 and then 3 at index 2"),
        (lambda: Layout.zigzag([[0, 4]], 2), "cu_seqlens must be a 1-D sequence of integers"),
        (lambda: Layout.zigzag([0.0, 4.0], 2), "cu_seqlens must be a 1-D sequence of integers"),
        (lambda: Layout.zigzag(-1, 2), "cu_seqlens must be at least 0"),
        (lambda: Layout.contiguous([0, 2**31], 2), "shorter than 2\\*\\*31"),
        (lambda: Layout.contiguous(4, 0), "ranks must be at least 1, got 0"),
        (lambda: Layout.contiguous(4, 1.5), "ranks must be an integer"),
        (lambda: Layout.striped(4, 2, stripe=0), "stripe must be at least 1"),
        (lambda: Layout.from_spans([], 4), "number of ranks must be at least 1"),
        (lambda: Layout.from_spans([[(0, 0, 2)], [(0, 1, 4)]], 4), "overlap at tokens 1 to 1"),
        (lambda: Layout.from_spans([[(0, 0, 2)], [(0, 3, 4)]], 4), "leave a gap at tokens 2 to 2"),
        (lambda: Layout.from_spans([[(0, 0, 2)], []], 4), "leave a gap at tokens 2 to 3"),
        (lambda: Layout.from_spans([[(0, 0, 5)]], 4), "lies outside its document"),
        (lambda: Layout.from_spans([[(1, 0, 1), (0, 0, 4)]], 4), "lies outside its document"),
        (lambda: Layout.from_spans([[(0, 0)]], 4), "triples"),
        (lambda: Layout.from_spans([[(0, 0.0, 4.0)]], 4), "integers"),
        (lambda: Layout.zigzag(4, 2).spans(2), "rank must be below the layout's 2 ranks, got 2"),
        (lambda: Layout.zigzag(4, 2).position_ids(-1), "rank must be at least 0"),
        (lambda: Layout.zigzag(4, 2).shard(torch.zeros(5), 0), "x must have 4 tokens"),
        (lambda: Layout.zigzag(4, 2).shard(torch.zeros(4), 0, dim=1), "x must have 4 tokens"),
        (lambda: seqpar.shift_labels(torch.zeros(5, dtype=torch.long), 4), "ids must have the 4 tokens"),
        (lambda: seqpar.shift_labels(torch.zeros(4), 4), "signed integer dtype"),
        (lambda: Mask.of(1, (-1, -1), None, Layout.zigzag(4, 2).geometry), "causal must be True or False"),
        (lambda: Mask.of(True, (-2, 0), None, Layout.zigzag(4, 2).geometry), "window_size.*at least -1, got -2"),
        (lambda: Mask.of(True, (1,), None, Layout.zigzag(4, 2).geometry), "window_size must be"),
        (lambda: Mask.of(True, (-1, -1), np.array([5]), Layout.zigzag(4, 2).geometry), "prefix_lens\\[0\\] must lie in"),
        (lambda: Mask.of(True, (-1, -1), np.array([1, 1]), Layout.zigzag(4, 2).geometry), "one entry a document"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
