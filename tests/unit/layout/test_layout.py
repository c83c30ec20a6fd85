"""Layouts against brute force over every token, and what they refuse."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.layout.spans import Span
from tests.support.cases import cu_seqlens, layouts
from tests.support.tiers import examples


@examples(12, 100)
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
        assert (
            layout.position_ids(rank).tolist() == (part.numpy() - np.array(cu)[documents]).tolist()
        )
        expanded = [cu[s.document] + i for s in layout.spans(rank) for i in range(s.start, s.stop)]
        assert expanded == part.tolist() and layout.tokens_on(rank) == len(part)
    again = Layout.from_spans([list(reversed(layout.spans(rank))) for rank in range(ranks)], cu)
    assert (
        again.geometry.digest
        == layout.geometry.digest
        == pickle.loads(pickle.dumps(layout)).geometry.digest
    )


def test_layouts_by_example():
    assert [Layout.contiguous(7, 2).spans(r) for r in range(2)] == [
        [Span(0, 0, 3)],
        [Span(0, 3, 7)],
    ]
    zigzag = Layout.zigzag([0, 8, 11], 2)
    assert zigzag.spans(0) == [Span(0, 0, 2), Span(0, 6, 8), Span(1, 2, 3)]
    assert zigzag.spans(1) == [Span(0, 2, 6), Span(1, 0, 2)]
    striped = Layout.striped(10, 2, stripe=3)
    assert striped.spans(0) == [Span(0, 0, 3), Span(0, 6, 9)] and striped.spans(1) == [
        Span(0, 3, 6),
        Span(0, 9, 10),
    ]
    assert Layout.contiguous(2, 4).spans(0) == [] and Layout.contiguous(0, 2).tokens == 0
    assert "tokens=8" in repr(Layout.zigzag(torch.tensor([0, 3, 8]), 2))
    assert zigzag.cu_seqlens.tolist() == [0, 8, 11] and zigzag.ranks == 2


def test_labels_stop_at_the_end_of_a_document():
    ids = torch.tensor([5, 6, 7, 8, 9])
    assert seqpar.shift_labels(ids, [0, 3, 3, 5]).tolist() == [6, 7, -100, 9, -100]
    assert seqpar.shift_labels(ids.expand(2, 5), 5).tolist() == [[6, 7, 8, 9, -100]] * 2
    for by, labels in ((2, [7, -100, -100, -100, -100]), (3, [-100] * 5), (10**30, [-100] * 5)):
        assert seqpar.shift_labels(ids, [0, 3, 3, 5], by).tolist() == labels
    assert seqpar.shift_labels(ids, 5, by=2).tolist() == [7, 8, 9, -100, -100]
    assert seqpar.shift_labels(ids[:0], [0, 0], by=2).tolist() == []


def test_shard_is_differentiable():
    layout = Layout.zigzag([0, 3, 8], 2)
    x = torch.arange(16.0).reshape(2, 8).requires_grad_()
    layout.shard(x, 1, dim=-1).sum().backward()
    expected = torch.zeros(2, 8)
    expected[:, layout.token_indices(1)] = 1
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.zigzag([1, 4], 2), "cu_seqlens must start at 0, got \\[1\\]"),
        (lambda: Layout.zigzag([], 2), "cu_seqlens must start at 0"),
        (
            lambda: Layout.zigzag([0, 4, 3], 2),
            "cu_seqlens must not decrease, got 4 and then 3 at index 2",
        ),
        (lambda: Layout.zigzag([[0, 4]], 2), "cu_seqlens must be a 1-D sequence of integers"),
        (lambda: Layout.zigzag([0.0, 4.0], 2), "cu_seqlens must be a 1-D sequence of integers"),
        (lambda: Layout.zigzag(-1, 2), "cu_seqlens must be at least 0"),
        (lambda: Layout.contiguous([0, 2**31], 2), "fewer than 2\\*\\*31"),
        (lambda: Layout.contiguous(4, 0), "ranks must be at least 1, got 0"),
        (lambda: Layout.contiguous(4, 1.5), "ranks must be an integer"),
        (lambda: Layout.striped(4, 2, stripe=0), "stripe must be at least 1"),
        (lambda: Layout.from_spans([], 4), "number of ranks must be at least 1"),
        (lambda: Layout.from_spans([[(0, 0, 2)], [(0, 1, 4)]], 4), "overlap at tokens 1 to 1"),
        (lambda: Layout.from_spans([[(0, 0, 2)], [(0, 3, 4)]], 4), "leave a gap at tokens 2 to 2"),
        (lambda: Layout.from_spans([[(0, 0, 2)], []], 4), "leave a gap at tokens 2 to 3"),
        (lambda: Layout.from_spans([[(0, 0, 5)]], 4), "must lie within the documents: Span"),
        (lambda: Layout.from_spans([[(1, 0, 1), (0, 0, 4)]], 4), "does not, there are 1 documents"),
        (lambda: Layout.from_spans([[(0, 0)]], 4), "triples"),
        (lambda: Layout.from_spans([[(0, 0.0, 4.0)]], 4), "integers"),
        (lambda: Layout.zigzag(4, 2).spans(2), "rank must be below the layout's 2 ranks, got 2"),
        (lambda: Layout.zigzag(4, 2).position_ids(-1), "rank must be at least 0"),
        (lambda: Layout.zigzag(4, 2).shard(torch.zeros(5), 0), "x must have 4 tokens"),
        (lambda: Layout.zigzag(4, 2).shard(torch.zeros(4), 0, dim=1), "x must have 4 tokens"),
        (
            lambda: seqpar.shift_labels(torch.zeros(5, dtype=torch.long), 4),
            "ids must have the 4 tokens",
        ),
        (
            lambda: seqpar.shift_labels(torch.zeros(4, dtype=torch.long), 4, by=0),
            "by must be at least 1, got 0",
        ),
        (lambda: seqpar.shift_labels(torch.zeros(4), 4), "signed integer dtype"),
        (
            lambda: Mask.of(1, (-1, -1), None, Layout.zigzag(4, 2).geometry),
            "causal must be True or False",
        ),
        (
            lambda: Mask.of(True, (-2, 0), None, Layout.zigzag(4, 2).geometry),
            "window_size.*at least -1, got -2",
        ),
        (lambda: Mask.of(True, (1,), None, Layout.zigzag(4, 2).geometry), "window_size must be"),
        (
            lambda: Mask.of(True, (-1, -1), np.array([5]), Layout.zigzag(4, 2).geometry),
            "prefix_lens\\[0\\] must lie in",
        ),
        (
            lambda: Mask.of(True, (-1, -1), np.array([1, 1]), Layout.zigzag(4, 2).geometry),
            "one entry a document",
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
