"""Cuts against their definitions, document by document, and what they take for many documents."""

import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.layout.handle import sizes_of
from seqpar.layout.masks.mask import UNLIMITED, Mask, slices_between
from tests.support.cases import cu_seqlens, layouts
from tests.support.tiers import examples, few_rows


def owners(kind, cu, ranks, stripe):
    """Return the rank of each token, from the definition."""
    tokens = range(cu[-1])
    if kind == "contiguous":
        return [next(c for c in range(ranks) if (c + 1) * cu[-1] // ranks > t) for t in tokens]
    found = []
    for length in np.diff(cu).tolist():
        if kind == "striped":
            found += [position // stripe % ranks for position in range(length)]
            continue
        for c in range(2 * ranks):
            chunk = (c + 1) * length // (2 * ranks) - c * length // (2 * ranks)
            found += [min(c, 2 * ranks - 1 - c)] * chunk
    return found


@examples(30, 400)
@given(st.data())
def test_a_rank_holds_what_the_definition_says(data):
    cu = data.draw(cu_seqlens(max_tokens=data.draw(st.sampled_from([4, 60]))))
    ranks, stripe = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    kind = data.draw(st.sampled_from(["contiguous", "zigzag", "striped"]))
    layout = getattr(Layout, kind)(cu, ranks, *[stripe] * (kind == "striped"))
    owner = np.array(owners(kind, cu, ranks, stripe), dtype=np.int64)
    for rank in range(ranks):
        assert layout.token_indices(rank).tolist() == np.flatnonzero(owner == rank).tolist()


@examples(30, 400)
@given(st.data())
def test_counts_are_those_of_the_spans(data):
    cu = data.draw(cu_seqlens(max_tokens=data.draw(st.sampled_from([6, 60, 300]))))
    layout = data.draw(layouts(cu, data.draw(st.integers(1, 9))))
    for rank in range(layout.ranks):
        spans = layout.spans(rank)
        assert layout.tokens_per_rank[rank] == sum(span.stop - span.start for span in spans)
        assert sizes_of(layout._sizes[rank]) == (
            sum(layout.tokens_per_rank[:rank]),
            len(cu) - 1,
            0,
            len(spans),
            len({span.document for span in spans}),
            sum(span.start > 0 for span in spans),
        )
        for one, other in itertools.pairwise(spans):
            assert one.document < other.document or one.stop < other.start


@few_rows()
@pytest.mark.parametrize("ranks", [64, 4096])
@pytest.mark.parametrize("options", [{}, {"equal": True}])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_many_documents_on_many_ranks_take_little(kind, options, ranks):
    """Documents and ranks are held, and not their product: 532 MiB for zigzag on 64 ranks, once."""
    cu = np.arange(100_001) * 200
    tracemalloc.start()
    layout = getattr(Layout, kind)(cu, ranks, **options)
    slices_between(layout.geometry, 7, layout.geometry, 7, Mask(UNLIMITED, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * 2**20
    assert len(pickle.dumps(layout)) < 2 * 2**20
    assert layout.tokens == sum(layout.tokens_per_rank)


@pytest.mark.parametrize("options", [{}, {"stripe": 1, "equal": True}])
def test_long_documents_take_no_more_than_short_ones(options):
    """Stripes are counted, and not listed: of so many tokens they took minutes, and gigabytes."""
    cu = np.arange(100_001) * 200_000
    tracemalloc.start()
    layout = Layout.striped(cu, 4096, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * 2**20
    assert max(layout.tokens_per_rank) - min(layout.tokens_per_rank) < 4096
