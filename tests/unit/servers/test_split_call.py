"""How calls are cut into tasks for servers: all pairs once, evenly, and the same each time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.attention.operands import OperandShape
from seqpar.core.memo import Memo
from seqpar.layout.masks.mask import Mask
from seqpar.servers.split_call import cut_call
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.cases import cu_seqlens, visible
from tests.support.mask_cases import disjoint_ranges
from tests.support.tiers import examples


def resolved(cu, kv_cu=None, causal=True, window=(-1, -1), prefix=None, ranges=None, kv_heads=2):
    """A call on one rank."""
    layout = Layout.contiguous(cu, 1).geometry
    kv_layout = layout if kv_cu is None else Layout.contiguous(kv_cu, 1).geometry
    prefix = None if prefix is None else np.array(prefix)
    mask = Mask.of(causal, window, prefix, kv_layout)
    mask = mask if ranges is None else Mask.of_ranges(ranges)
    shape = OperandShape(torch.bfloat16, 1, 8, kv_heads, 64, 64)
    options = CallOptions(1.0, 0.0, "default", True)
    return ResolvedCall(0, layout, kv_layout, mask, options, shape, False, False, Memo())


def rows(task):
    """The packed rows of a task's queries and keys."""
    return (x._indices(torch.device("cpu")).numpy() for x in (task.queries, task.keys))


@st.composite
def calls(draw):
    cu = draw(cu_seqlens(60))
    kv_cu = draw(st.one_of(st.none(), cu_seqlens(60, documents=len(cu) - 1)))
    lengths = np.diff(kv_cu or cu).tolist()
    prefix = draw(st.one_of(st.none(), st.tuples(*[st.integers(0, n) for n in lengths])))
    window = draw(st.sampled_from([(-1, -1), (5, 0), (3, 7), (0, 0), (-1, 2)]))
    ranges = None
    if draw(st.booleans()):
        ranges = disjoint_ranges(draw(st.integers(0, 2**32 - 1)), cu, kv_cu)
    return cu, kv_cu, draw(st.booleans()), window, prefix, ranges


@examples(30, 400)
@given(drawn=calls(), most=st.integers(1, 9), tile=st.integers(1, 8))
def test_each_pair_is_in_one_task(drawn, most, tile):
    cu, kv_cu, *masked = drawn
    found = cut_call(resolved(*drawn), most, tile)
    seen = np.zeros((cu[-1], (kv_cu or cu)[-1]), int)
    times = sum(np.bincount(next(rows(task)), minlength=cu[-1]) for task in found)
    for task in found:
        q_rows, k_rows = rows(task)
        slices = task.slices
        assert slices.area and q_rows.size == task.queries.count
        assert task.whole == (times[q_rows] == 1).all()
        for i, (q, k) in enumerate(zip(slices.q_rows, slices.k_rows, strict=True)):
            starts, stops = slices.key_intervals(i)
            for row, start, stop in zip(range(*q), starts, stops, strict=True):
                seen[q_rows[row], k_rows[k[0] + start : k[0] + stop]] += 1
    assert (seen == visible(cu, kv_cu or cu, *masked)).all() and len(found) <= most + 1


@pytest.mark.parametrize(
    "cu", [[0, 8192], [0, 300, 6000, 6001, 16384], np.arange(0, 16385, 512).tolist()]
)
@pytest.mark.parametrize("options", [{}, {"window": (1023, 0)}, {"causal": False}])
def test_tasks_are_even_and_begin_at_tiles(cu, options):
    found = cut_call(resolved(cu, **options), 16, 128)
    areas = np.array([task.slices.area for task in found])
    assert len(found) >= 12 and areas.max() <= 1.1 * areas.sum() / 16
    edges = {0, *cu}
    for task in found:
        q_rows, _ = rows(task)
        for edge in (*q_rows[:1], *q_rows[1:][np.diff(q_rows) > 1]):
            document = max(x for x in edges if x <= edge)
            assert (edge - document) % 128 == 0


def test_short_calls_have_few_tasks():
    counts = [len(cut_call(resolved([0, n]), 16, 128)) for n in (1, 300, 512, 1024, 65536)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] >= 15


def test_a_window_that_divides_coarsely_has_fewer_tasks():
    found = cut_call(resolved([0, 8192], window=(1023, 0)), 256, 128)
    areas = np.array([task.slices.area for task in found])
    assert 30 <= len(found) <= 65 and areas.max() <= 1.1 * areas.mean()


def test_heads_decide_what_travels():
    few, many = (
        sum(task.keys.count for task in cut_call(resolved([0, 8192], kv_heads=n), 16, 128))
        for n in (1, 8)
    )
    assert many < few


def test_the_same_call_is_cut_alike():
    first, second = (cut_call(resolved([0, 100, 900]), 8, 16) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(map(np.array_equal, rows(one), rows(other)))
        assert all(
            np.array_equal(getattr(one.slices, name), getattr(other.slices, name))
            for name in ("q_rows", "k_rows", "bands")
        )
