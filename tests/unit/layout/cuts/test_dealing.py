"""Layouts that give ranks equally many tokens: against their definitions, and what they balance."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Span, shift_labels
from seqpar.layout.masks.mask import UNLIMITED, Mask, slices_between
from seqpar.layout.plot import causal_work
from tests.support.cases import Case, assert_right, cu_seqlens, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import examples, few_rows

KINDS = ["contiguous", "zigzag", "striped"]


def dealt(tokens, ranks, singles, part):
    """Return the rank of each token of a row that is dealt out in rounds, from the definition."""
    owner, left = [], -(-tokens // ranks)
    while left:
        size = 1 if singles > 0 else min(part, left)
        singles, left = singles - size, left - size
        owner += [rank for rank in range(ranks) for _ in range(size)]
    return owner[:tokens]


def zigzag_owners(lengths, ranks, min_chunk):
    """Return the rank of each token of the pack under `EvenZigzag`, from its definition."""
    part = 2 * (min_chunk or 0)
    long = [d for d, length in enumerate(lengths) if length >= part * ranks]
    short = [d for d, length in enumerate(lengths) if length < part * ranks]
    short.sort(key=lambda d: -lengths[d])
    singles = -(-sum(lengths[d] for d in long) // ranks)
    row, found = dealt(sum(lengths), ranks, singles, part), [None] * len(lengths)
    for number, d in enumerate(long + short):
        taken, row = row[: lengths[d]], row[lengths[d] :]
        counts = [taken.count(rank) for rank in range(ranks)]
        low = [(count + number % 2) // 2 for count in counts]
        found[d] = [rank for rank in range(ranks) for _ in range(low[rank])]
        found[d] += [r for r in reversed(range(ranks)) for _ in range(counts[r] - low[r])]
    return [rank for owners in found for rank in owners]


@examples(50, 400)
@given(st.data())
def test_a_rank_holds_what_the_definition_says(data):
    cu = data.draw(cu_seqlens(max_tokens=data.draw(st.sampled_from([4, 60, 300]))))
    ranks, size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    kind = data.draw(st.sampled_from(["zigzag", "min_chunk", "striped"]))
    if kind == "striped":
        layout = Layout.striped(cu, ranks, size, equal=True)
        owner = dealt(layout.tokens, ranks, 0, size)
    elif kind == "zigzag":
        layout = Layout.zigzag(cu, ranks, equal=True, multiple_of=size)
        owner = zigzag_owners(np.diff(layout.cu_seqlens).tolist(), ranks, None)
    else:
        layout = Layout.zigzag(cu, ranks, min_chunk=size)
        owner = zigzag_owners(np.diff(cu).tolist(), ranks, size)
    for rank in range(ranks):
        held = np.flatnonzero(np.array(owner, dtype=np.int64) == rank).tolist()
        assert layout.token_indices(rank).tolist() == held


@examples(30, 400)
@given(st.data())
def test_equal_layouts_give_ranks_equal_numbers_of_tokens(data):
    cu = data.draw(cu_seqlens(max_tokens=80))
    ranks, multiple_of = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    kind = data.draw(st.sampled_from(KINDS))
    options = {"min_chunk": data.draw(st.integers(1, 9))} if kind == "zigzag" else {}
    options = options if data.draw(st.booleans()) else {}
    layout = getattr(Layout, kind)(cu, ranks, equal=True, multiple_of=multiple_of, **options)
    (n,) = set(layout.tokens_per_rank)
    assert n % multiple_of == 0 and 0 <= n - -(-cu[-1] // ranks) < multiple_of
    assert layout.cu_seqlens.tolist() == [*cu, ranks * n] and layout.documents == len(cu)

    x = torch.arange(1, cu[-1] + 1, dtype=torch.float64).requires_grad_()
    whole = torch.cat([x, torch.full((layout.tokens - cu[-1],), -7.0)])
    for rank in range(ranks):
        padding, part = layout.padding(rank), layout.shard(x, rank, value=-7)
        assert part.equal(layout.shard(whole, rank)) and padding.equal(part == -7)
        assert padding.equal(padding.sort()[0])  # padding is behind everything else
        (layout.shard(x, rank) * part.detach()).sum().backward()
    assert x.grad.equal(x.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_without_padding_have_none(kind):
    layout = getattr(Layout, kind)([0, 3, 8], 2)
    assert not any(layout.padding(rank).any() for rank in range(2))
    assert layout.padding(0).dtype == torch.bool


def test_layouts_with_different_padding_are_unequal():
    equal, whole = Layout.contiguous([0, 3, 7], 2, equal=True), Layout.contiguous([0, 3, 7, 8], 2)
    assert equal.geometry is whole.geometry and equal != whole
    assert equal.chunked(2) != whole.chunked(2)
    assert equal.chunked(2).padding(1).tolist() == equal.padding(1).tolist() == [0, 0, 0, 1]
    assert not whole.chunked(2).padding(1).any()


def test_labels_of_padding_are_ignored():
    ids, layout = torch.arange(1, 8), Layout.zigzag([0, 3, 7], 2, equal=True, multiple_of=3)
    labels = [layout.shard(shift_labels(ids, [0, 3, 7]), rank, value=-100) for rank in range(2)]
    for rank in range(2):
        assert (labels[rank][layout.padding(rank)] == -100).all()
    assert sum((part >= 0).sum() for part in labels) == 5


def test_padding_values_beyond_a_float_are_refused():
    layout = Layout.contiguous(3, 2, equal=True)
    for dtype, value in [(torch.float16, -1e9), (torch.bfloat16, 1e39), (torch.float32, 10**39)]:
        with pytest.raises(ValueError, match=f"value must be a number that {dtype} can hold, got"):
            layout.shard(torch.ones(3, dtype=dtype), 1, value=value)
    for value in (-torch.inf, Fraction(1, 2), torch.finfo(torch.float16).min):
        assert layout.shard(torch.ones(3).half(), 1, value=value).tolist() == [1, value]


def test_a_tensor_is_padded_along_any_dimension():
    layout = Layout.striped(7, 2, equal=True, multiple_of=6)
    x = torch.rand(3, 7, 2)
    for rank in range(2):
        assert layout.shard(x, rank, dim=-2).equal(
            layout.shard(x.movedim(1, 0), rank).movedim(0, 1)
        )
    with pytest.raises(ValueError, match="x must have 12 or 7 tokens \\(the layout's\\)"):
        layout.shard(torch.rand(8), 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("value", [-100, 0.5, 2**63, "a", None])
def test_padding_values_must_fit_the_dtype(dtype, value):
    layout, x = Layout.contiguous(3, 2, equal=True), torch.ones(3, dtype=dtype)
    if value in (-100, 0.5, 2**63) and (
        dtype.is_floating_point or (dtype, value) == (torch.int64, -100)
    ):
        assert layout.shard(x, 1, value=value).tolist() == [1, value]
        return
    with pytest.raises(ValueError, match=f"value must be a number that {dtype} can hold, got"):
        layout.shard(x, 1, value=value)


@few_rows()
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_right_beside_padding(kind, strategy):
    layout = getattr(Layout, kind)([0, 13, 14, 40], 2, equal=True, multiple_of=8)
    case = Case(strategy, layout, causal=True, heads=4, kv_heads=2)
    for got in virtual(2, run, case):
        assert_right(got, oracle(case), case.dtype)


def spread(layout):
    """Return the most tokens of a rank, and the most causal work, over the mean."""
    tokens, work = np.array(layout.tokens_per_rank), causal_work(layout)
    return tokens.max() / tokens.mean(), work.max() / work.mean()


@few_rows()
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("lengths", [[300_000, 77_777], [50_000] * 5 + [9_999] * 7])
def test_equal_zigzag_keeps_zigzags_balance_on_long_documents(lengths, ranks):
    cu = np.r_[0, np.cumsum(lengths)]
    assert spread(Layout.zigzag(cu, ranks, equal=True))[1] < 1.002
    assert spread(Layout.zigzag(cu, ranks))[1] < 1.01


def test_min_chunk_keeps_short_documents_whole_and_balanced():
    """5,000 documents of 200 tokens on 64 ranks: chunks of 1 or 2 tokens were 32 times as many."""
    cu, causal = np.arange(5001) * 200, Mask(UNLIMITED, 0)
    fine, coarse = (Layout.zigzag(cu, 64, min_chunk=chunk) for chunk in (None, 128))
    assert spread(fine) > (1.27, 1.27) and max(spread(coarse)) < 1.001
    assert len(coarse.spans(7)) < 300 < 10_000 == len(fine.spans(7))

    def slices(layout):
        ranks = range(layout.ranks)
        return sum(
            len(slices_between(layout.geometry, 7, layout.geometry, r, causal)) for r in ranks
        )

    assert slices(coarse) < 600 and slices(fine) == 320_000


@pytest.mark.parametrize("min_chunk", [64, 256])
def test_min_chunk_balances_documents_of_any_length(min_chunk):
    lengths = (np.random.default_rng(0).pareto(1.2, 2000) * 500).astype(int).clip(1, 100_000)
    layout = Layout.zigzag(np.r_[0, np.cumsum(lengths)], 16, min_chunk=min_chunk)
    assert max(spread(layout)) < 1.01
    assert (
        sum(map(len, map(layout.spans, range(16)))) < 2 * lengths.size + lengths.sum() // min_chunk
    )


def test_a_document_that_fits_stays_on_one_rank():
    layout = Layout.zigzag([0, 100, 200, 296, 300], 3, min_chunk=50)
    assert layout.spans(0) == [Span(0, 0, 100)] and layout.spans(1) == [Span(1, 0, 100)]
    assert layout.spans(2) == [Span(2, 0, 96), Span(3, 0, 4)]


@pytest.mark.parametrize(
    ("cu", "ranks", "tokens"),
    [
        (96, 4, [24] * 4),  # 128 tokens a stripe gave [96, 0, 0, 0]
        (np.arange(101), 4, [25] * 4),
        (np.arange(51) * 2, 8, [13] * 4 + [12] * 4),
        (3, 4, [1, 1, 1, 0]),
        (0, 2, [0, 0]),
    ],
)
def test_default_stripes_leave_no_rank_without_tokens(cu, ranks, tokens):
    assert Layout.striped(cu, ranks).tokens_per_rank == tokens
    assert Layout.striped(96, 4, stripe=128).tokens_per_rank == [96, 0, 0, 0]  # as it was asked for


def test_default_stripes_have_128_tokens_where_possible():
    for cu in ([0, 385, 500], 10_000):
        layouts = Layout.striped(cu, 4), Layout.striped(cu, 4, 128)
        assert [x.geometry.cut for x in layouts] == [layouts[0].geometry.cut] * 2
    assert min(Layout.striped([0, 384, 500], 4).tokens_per_rank) == 125


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.zigzag(4, 2, multiple_of=2), "multiple_of needs equal=True, got 2"),
        (lambda: Layout.zigzag(4, 2, equal=True, multiple_of=0), "multiple_of must be at least 1"),
        (lambda: Layout.striped(4, 2, equal=True, multiple_of=1.5), "multiple_of must be an int"),
        (lambda: Layout.striped(4, 2, equal=True, multiple_of=None), "multiple_of must be an int"),
        (lambda: Layout.contiguous(4, 2, equal=True, multiple_of=2**31), "multiple_of must leave"),
        (lambda: Layout.zigzag(4, 2, equal=True, multiple_of=2**70), "multiple_of must leave"),
        (lambda: Layout.contiguous(4, 2, equal=1), "equal must be True or False, got 1"),
        (lambda: Layout.zigzag(4, 2, equal="yes"), "equal must be True or False, got 'yes'"),
        (lambda: Layout.zigzag(4, 2, min_chunk=0), "min_chunk must be at least 1"),
        (lambda: Layout.zigzag(4, 2, min_chunk="a"), "min_chunk must be an integer"),
        (lambda: Layout.zigzag(4, 2, min_chunk=0.5), "min_chunk must be an integer"),
        (lambda: Layout.zigzag(4, 2).padding(2), "rank must be below"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("size", [2**31, 2**62, 10**30])
def test_sizes_beyond_all_documents_are_the_largest(size):
    whole = Layout.zigzag([0, 5, 12], 3, min_chunk=size)
    assert whole.tokens_per_rank == [4, 4, 4]
    assert Layout.striped([0, 5, 12], 3, size, equal=True).tokens_per_rank == [4, 4, 4]
