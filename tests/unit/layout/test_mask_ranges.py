"""Masks of ranges: their tables against brute force, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Mask
from seqpar.layout.task_check import check_tasks
from seqpar.layout.task_parts import Parts
from tests.support.cases import cu_seqlens, layouts
from tests.support.mask_cases import any_range, disjoint_ranges, times_seen
from tests.support.plans import AtRandom, at_home
from tests.support.tiers import examples
from tests.unit.layout.test_mask import pairs

seeds = st.integers(0, 2**32 - 1)


@st.composite
def masked(draw):
    """Layouts of queries and keys on some ranks, and disjoint ranges."""
    cu, ranks = draw(cu_seqlens(max_tokens=24)), draw(st.integers(1, 4))
    kv_cu = draw(st.one_of(st.just(cu), cu_seqlens(max_tokens=24, documents=len(cu) - 1)))
    layout = draw(layouts(cu, ranks)), draw(layouts(kv_cu, ranks))
    return *layout, disjoint_ranges(draw(seeds), cu, kv_cu), times_seen


@examples(40, 400)
@given(masked(), st.booleans())
def test_slices_are_exactly_the_pairs_of_the_ranges(made, queries_travel):
    layout, kv_layout, ranges, _ = made
    expected = times_seen(ranges, layout.cu_seqlens, kv_layout.cu_seqlens)
    mask, found = Mask.of_ranges(ranges), np.zeros_like(expected)
    for own, peer in itertools.product(range(layout.ranks), repeat=2):
        found += pairs(layout, kv_layout, own, peer, mask, queries_travel)
    np.testing.assert_array_equal(found, expected)


@examples(40, 400)
@given(masked(), seeds)
def test_tasks_and_their_parts_are_exactly_the_pairs_of_the_ranges(made, seed):
    layout, kv_layout, ranges, _ = made
    geometries, mask = (layout.geometry, kv_layout.geometry), Mask.of_ranges(ranges)
    area = times_seen(ranges, layout.cu_seqlens, kv_layout.cu_seqlens).sum()
    for plan in (at_home, AtRandom(seed % 100)):
        tasks = plan(*geometries, mask)
        assert Parts.of(tasks, *geometries, mask).areas().sum() == area
        check_tasks("plan", tasks, *geometries, mask)


@examples(200, 2000)
@given(seeds, st.integers(1, 12))
def test_ranges_are_refused_just_if_some_pair_is_in_two(seed, count):
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
