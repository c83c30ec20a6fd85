"""Masks of ranges: their tables against brute force, and what is refused."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Mask
from seqpar.balance.disaggregation.disaggregate import RowBytes, disaggregate
from seqpar.layout.masks.mask_ranges import MaskRanges, from_handle
from seqpar.layout.plot import computing_ranks
from seqpar.layout.tasks.tasks import Parts, check_tasks
from tests.support.cases import cu_seqlens, layouts
from tests.support.mask_cases import any_range, disjoint_ranges, times_seen
from tests.support.plans import AtRandom, at_home
from tests.support.tiers import examples
from tests.unit.layout.masks.test_mask import pairs

seeds = st.integers(0, 2**32 - 1)


@st.composite
def masked(draw):
    """Layouts of queries and keys on some ranks, and disjoint ranges."""
    cu, ranks = draw(cu_seqlens(max_tokens=24)), draw(st.integers(1, 4))
    kv_cu = draw(st.one_of(st.just(cu), cu_seqlens(max_tokens=24, documents=len(cu) - 1)))
    layout = draw(layouts(cu, ranks)), draw(layouts(kv_cu, ranks))
    return *layout, disjoint_ranges(draw(seeds), cu, kv_cu)


@examples(20, 150)
@given(masked(), st.booleans())
def test_slices_are_exactly_the_pairs_of_the_ranges(made, queries_travel):
    layout, kv_layout, ranges = made
    expected = times_seen(ranges, layout.cu_seqlens, kv_layout.cu_seqlens)
    mask, found = Mask.of_ranges(ranges), np.zeros_like(expected)
    for own, peer in itertools.product(range(layout.ranks), repeat=2):
        found += pairs(layout, kv_layout, own, peer, mask, queries_travel)
    np.testing.assert_array_equal(found, expected)


@examples(20, 150)
@given(masked(), seeds)
def test_tasks_and_parts_cover_exactly_the_ranges_pairs(made, seed):
    layout, kv_layout, ranges = made
    geometries, mask = (layout.geometry, kv_layout.geometry), Mask.of_ranges(ranges)
    area = times_seen(ranges, layout.cu_seqlens, kv_layout.cu_seqlens).sum()
    for plan in (at_home, AtRandom(seed % 100)):
        tasks = plan(*geometries, mask)
        assert Parts.of(tasks, *geometries, mask).areas().sum() == area
        check_tasks("plan", tasks, *geometries, mask)


@examples(100, 700)
@given(seeds, st.integers(1, 12))
def test_ranges_that_share_a_pair_are_refused(seed, count):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 9, random.integers(1, 3))
    kv_lengths = random.integers(0, 9, lengths.size)
    ranges = [any_range(random, lengths, kv_lengths) for _ in range(count)]
    cu, kv_cu = (np.r_[0, np.cumsum(x)] for x in (lengths, kv_lengths))
    seen = times_seen(ranges, cu, kv_cu)
    if seen.max(initial=0) <= 1:
        Mask.of_ranges(ranges)
        return
    with pytest.raises(ValueError, match="must be disjoint") as caught:
        Mask.of_ranges(ranges)
    words = str(caught.value).replace(",", "").replace("[", " ").replace("]", " ").split()
    one, other = (int(words[i + 1]) for i, word in enumerate(words) if word == "ranges" and i)
    query, key, document = (int(words[words.index(x) + 1]) for x in ("query", "key", "document"))
    for i in (one, other):
        assert times_seen([ranges[i]], cu, kv_cu)[cu[document] + query, kv_cu[document] + key] == 1


def numbers(ranges):
    """The same without None."""
    unlimited = lambda bound, sign: sign * 2**50 if bound is None else bound  # noqa: E731
    return [[*row[:5], unlimited(row[5], -1), unlimited(row[6], 1)] for row in ranges]


def test_the_order_of_ranges_does_not_matter():
    ranges = [(0, 0, 9, 0, 9, None, 0), (0, 2, 5, 2, 5, 1, None), (1, 0, 3, 0, 0, None, None)]
    mask, again = Mask.of_ranges(ranges), Mask.of_ranges(np.array(numbers(ranges[1::-1])))
    assert mask == again and hash(mask) == hash(again) and len(mask.ranges) == 2
    assert mask != Mask.of_ranges(ranges[:1]) and "2 ranges" in repr(mask)
    assert hash(mask.ranges) == int.from_bytes(mask.ranges.key[:7])  # in any process
    for copied in (pickle.loads(pickle.dumps(mask)), Mask.of_ranges(torch.tensor(numbers(ranges)))):
        assert copied == mask and torch.equal(copied.ranges.handle, mask.ranges.handle)


def test_a_handle_equals_its_original_mask():
    words = Mask.of_ranges([(0, 0, 7, 0, 9, None, 0)]).ranges.handle.clone()
    found = from_handle(words)
    assert found == MaskRanges.of([(0, 0, 7, 0, 9, None, 0)]) and len(found) == 1
    words[-1] += 1
    words[0] += 1
    with pytest.raises(ValueError, match="mask: code has changed the tensor"):
        from_handle(words)


@examples(10, 200)
@given(masked())
def test_a_drawn_range_mask_matches_brute_force(made):
    layout, _, ranges = made
    lengths = np.diff(layout.cu_seqlens)
    ranges = [x for x in ranges if max(x[2], x[4]) <= lengths[x[0]]]
    drawn = computing_ranks(Mask.of_ranges(ranges), layout)
    assert np.array_equal(drawn >= 0, times_seen(ranges, layout.cu_seqlens) > 0)


@examples(10, 200)
@given(masked())
def test_the_planner_gives_every_pair_to_one_task(made):
    """Also where ranges share a rectangle, whose tasks then have bands."""
    layout, kv_layout, ranges = made
    mask, geometries = Mask.of_ranges(ranges), (layout.geometry, kv_layout.geometry)
    row_bytes = RowBytes.of(4, 2, 8)
    tasks = disaggregate(layout, mask, row_bytes=row_bytes, kv_layout=kv_layout, tile=2)
    check_tasks("plan", tasks, *geometries, mask)


WRONG = {
    "three numbers": ([(0, 1, 2)], r"ranges must be \(document, q_start, .*got \(0, 1, 2\) at"),
    "no list": (5, r"ranges must be \(document, q_start, .*got 5"),
    "six columns": (np.zeros((3, 6), int), r"ranges must be .*got \(3, 6\) of int64"),
    "a fraction": ([(0, 0, 1.5, 0, 1, None, None)], "ranges: q_stop must be .* of integers"),
    "no document": ([(None, 0, 1, 0, 1, None, None)], "ranges: document must be .* of integers"),
    "negative": ([(0, 0, 1, 0, 1, 0, 0), (-1, 0, 1, 0, 1, 0, 0)], r"ranges\[1\] must have docu"),
    "reversed": ([(0, 0, 1, 3, 1, None, None)], r"ranges\[0\] must have k_start <= k_stop, got"),
    "no band": ([(0, 0, 9, 0, 9, 3, 2)], r"ranges\[0\] must have low <= high, got .*3, 2"),
    "too long": ([(0, 0, 2**31, 0, 1, None, None)], r"ranges\[0\] must have q_stop from 0 to"),
    "the same rectangle": (
        [(0, 0, 9, 0, 9, None, 0), (0, 0, 9, 0, 9, 0, None)],
        r"disjoint, but ranges\[0\], \(0, 0, 9, 0, 9, None, 0\), and .* query 0 and key 0 of docu",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ranges_are_refused_by_name(name):
    ranges, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        Mask.of_ranges(ranges)
