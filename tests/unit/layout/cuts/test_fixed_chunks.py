"""Chunked layouts: the same tokens, in documents of a size."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.layout.handle import sizes_of
from tests.support.cases import Case, assert_right, cu_seqlens, layouts, oracle, run, visible
from tests.support.ranks import virtual
from tests.support.tiers import examples


@examples(30, 400)
@given(st.data())
def test_ranks_hold_the_same_tokens_of_shorter_documents(data):
    cu = data.draw(cu_seqlens(max_tokens=60))
    layout, size = (
        data.draw(layouts(cu, data.draw(st.integers(1, 5)))),
        data.draw(st.integers(1, 9)),
    )
    chunked = layout.chunked(size)
    expected = [[*range(a, b, size)] or [a] for a, b in itertools.pairwise(cu)]
    assert chunked.cu_seqlens.tolist() == [*np.concatenate(expected), cu[-1]]
    assert chunked.tokens_per_rank == layout.tokens_per_rank
    for rank in range(layout.ranks):
        assert chunked.token_indices(rank).equal(layout.token_indices(rank))
        assert chunked.position_ids(rank).equal(layout.position_ids(rank) % size)
        spans = chunked.spans(rank)
        assert sizes_of(chunked._sizes[rank])[3:] == (
            len(spans),
            len({span.document for span in spans}),
            sum(span.start > 0 for span in spans),
        )


@pytest.mark.parametrize("strategy", ["ring", "token_ring"])
def test_attention_over_chunks_is_masked_attention(strategy):
    layout, size = Layout.zigzag([0, 17, 18, 40], 3), 7
    case = Case(strategy, layout.chunked(size), causal=True)
    for got in virtual(3, run, case):
        assert_right(got, oracle(case), case.dtype)
    cu = layout.cu_seqlens
    chunk = np.concatenate([np.arange(length) // size for length in np.diff(cu)])
    masked = visible(cu, cu, True, (-1, -1), None) & (chunk[:, None] == chunk)
    chunks = case.layout.cu_seqlens
    assert np.array_equal(visible(chunks, chunks, True, (-1, -1), None), masked)


def test_padding_stays_padding():
    layout = Layout.zigzag(20, 2, equal=True, multiple_of=8)
    chunked = layout.chunked(3)
    again = pickle.loads(pickle.dumps(chunked))
    for rank in range(2):
        assert layout.padding(rank).equal(chunked.padding(rank))
        assert layout.padding(rank).equal(again.padding(rank))
        assert again.spans(rank) == chunked.spans(rank)


def test_it_is_made_once():
    layout = Layout.zigzag(20, 2)
    assert layout.chunked(3) is layout.chunked(3) is not layout.chunked(4)


@pytest.mark.parametrize("size", [20, 2**62, 10**30])
def test_a_large_size_leaves_documents_whole(size):
    assert Layout.zigzag([0, 5, 20], 2).chunked(size).cu_seqlens.tolist() == [0, 5, 20]


@pytest.mark.parametrize("size", [0, -1, 1.5, None, "8"])
def test_a_wrong_size_is_refused(size):
    with pytest.raises(ValueError, match="size must be"):
        Layout.zigzag(4, 2).chunked(size)
