"""Tasks: refused unless every visible pair is in just one, and cut without losing any."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.layout.tasks.task_rows import ServerRows, TaskRows, arriving_at, task_slices
from seqpar.layout.tasks.tasks import Parts, TaskRectangles, as_tasks, check_tasks, digest_of
from tests.support.cases import cu_seqlens, layouts, visible
from tests.support.mask_cases import disjoint_ranges
from tests.support.plans import AtRandom, at_home, tasks
from tests.support.tiers import examples

WINDOWS = [(-1, -1), (5, 0), (3, 7), (0, 0), (-1, 2), (12, -1)]


@st.composite
def plans(draw):
    """A layout, the geometry of its keys, a mask and a plan; and who sees whom."""
    ranks, cu = draw(st.integers(1, 4)), draw(cu_seqlens(40))
    kv_cu = draw(st.one_of(st.just(cu), cu_seqlens(40, documents=len(cu) - 1)))
    queries, keys = (draw(layouts(x, ranks)).geometry for x in (cu, kv_cu))
    causal, window = draw(st.booleans()), draw(st.sampled_from(WINDOWS))
    prefix = draw(st.one_of(st.none(), st.tuples(*(st.integers(0, n) for n in np.diff(kv_cu)))))
    mask = Mask.of(causal, window, None if prefix is None else np.array(prefix), keys)
    ranges = None
    if draw(st.booleans()):
        ranges = disjoint_ranges(draw(st.integers(0, 2**32 - 1)), cu, kv_cu)
        mask = Mask.of_ranges(ranges)
    plan = AtRandom(draw(st.integers(0, 99)))(queries, keys, mask)
    return queries, keys, mask, plan, visible(cu, kv_cu, causal, window, prefix, ranges)


def pairs_of(plan, seen, queries, keys):
    """(T, T_kv): in how many tasks each visible pair is."""
    count = np.zeros(seen.shape, int)
    for document, q0, q1, k0, k1, _ in zip(*plan[:6], strict=True):
        q, k = queries.cu_seqlens[document], keys.cu_seqlens[document]
        count[q + q0 : q + q1, k + k0 : k + k1] += 1
    return count * seen


@examples(20, 80)
@given(plans(), st.randoms(use_true_random=False))
def test_partitions_are_accepted_and_nothing_else(made, random):
    queries, keys, mask, plan, seen = made
    check_tasks("plan", plan, queries, keys, mask)
    if not len(plan.documents):
        return
    index = [random.randrange(len(plan.documents)) for _ in plan.documents]
    other = plan.take(np.array(index))
    if np.array_equal(pairs_of(other, seen, queries, keys), seen):
        check_tasks("plan", other, queries, keys, mask)
    else:
        with pytest.raises(ValueError, match="plan must have every pair that the mask shows in"):
            check_tasks("plan", other, queries, keys, mask)


@examples(20, 80)
@given(plans(), st.sampled_from([1, 5, 1000]))
def test_slices_of_all_servers_have_every_pair_once(made, rows_of_stage):
    queries, keys, mask, plan, seen = made
    rows, found = TaskRows(plan, queries, keys, mask, rows_of_stage), np.zeros(seen.shape, int)
    assert (
        rows.parts.areas().sum() == seen.sum() == Parts.of(plan, queries, keys, mask).areas().sum()
    )
    for rank in range(queries.ranks):
        blocks = []
        for geometry, needed in ((queries, rows.queries), (keys, rows.keys)):
            block = ServerRows.joined([*arriving_at(rank, geometry, needed, rows.stages).values()])
            blocks.append([(ServerRows.local(geometry, rank), geometry), (block, geometry)])
        for (q, _), (k, _) in itertools.product(*blocks):
            slices = task_slices(rows.of_server(rank), q, k, keys.lengths - queries.lengths)
            q_tokens, k_tokens = tokens(q, queries), tokens(k, keys)
            for i, ((a, b), (c, _)) in enumerate(zip(slices.q_rows, slices.k_rows, strict=True)):
                for row, start, stop in zip(range(a, b), *slices.key_intervals(i), strict=True):
                    np.add.at(found, (q_tokens[row], k_tokens[c + start : c + stop]), 1)
    assert np.array_equal(found, seen)


def tokens(block, geometry):
    """The packed index of every row of a block."""
    documents = block.documents[block.holding.documents]
    counts = block.holding.stops - block.holding.starts
    return geometry.cu_seqlens[np.repeat(documents, counts)] + block.holding.positions


GOOD = at_home(*[Layout.zigzag([0, 9, 20], 2).geometry] * 2, None)


@pytest.mark.parametrize(("changes", "message"), [
    ({"servers": 2}, r"servers\[0\] from 0 to 1, got 2"),
    ({"documents": -1}, r"documents\[0\] from 0 to 1, got -1"),
    ({"q_stops": 10}, r"q_stops\[0\] from 0 to 9, got 10"),
    ({"k_starts": -1}, r"k_starts\[0\] from 0 to 9, got -1"),
    ({"k_stops": 12}, r"k_stops\[0\] from 0 to 9, got 12"),
    ({"q_stops": 1}, "tasks of document 0 that have some pair twice, or not at all"),
])  # fmt: skip
def test_wrong_tasks_are_refused_by_name(changes, message):
    geometry = Layout.zigzag([0, 9, 20], 2).geometry
    plan = TaskRectangles(*(column.copy() for column in GOOD[:6]))
    for field, value in changes.items():
        getattr(plan, field)[0] = value
    with pytest.raises(ValueError, match=f"plan must have .*{message}"):
        check_tasks("plan", plan, geometry, geometry, Mask.of(True, (-1, -1), None, geometry))


def test_what_are_no_tasks_is_refused():
    for value, message in [
        (None, "plan must be TaskRectangles, got None"),
        (GOOD._replace(servers=GOOD.servers[1:]), "one integer a task in servers"),
        (GOOD._replace(q_starts=GOOD.q_starts / 2), "one integer a task in q_starts"),
        (GOOD._replace(documents=None), "one integer a task in documents"),
    ]:
        with pytest.raises(ValueError, match=message):
            as_tasks("plan", value)


def test_digests_tell_tasks_apart():
    assert digest_of(GOOD) == digest_of(as_tasks("plan", GOOD))
    other = tasks(np.stack(GOOD[:6], 1)[::-1])
    assert digest_of(GOOD) != digest_of(other)
    assert digest_of(GOOD) != digest_of(GOOD._replace(lows=GOOD.k_starts))


def test_a_servers_own_work_spreads_over_stages():
    """Also with keys that guests of one stage need: those of the others do not wait for it, and
    gradients return early."""
    layout = Layout.contiguous(800, 2).geometry
    plan = tasks([(0, 0, 200, 0, 800, 0), (0, 200, 400, 0, 800, 1), (0, 400, 800, 0, 800, 1)])
    mask = Mask.of(True, (-1, -1), None, layout)
    rows = TaskRows(plan, layout, layout, mask, stage_rows=100)
    coming = arriving_at(1, layout, rows.keys, rows.stages)
    own = np.zeros(4, int)
    for stages, block in coming.items():
        assert 0 <= stages.first <= stages.own <= stages.last < rows.stages == 4
        own[stages.own] += block.holding.tokens
    assert own.sum() == 400 and np.abs(own - 400 * np.array([1, 2, 2, 2]) / 7).max() <= 4
    # The guests of the first stage see so many keys, which are there in time.
    first_guests = 200 + 200 // 7
    assert sum(x.holding.tokens for stages, x in coming.items() if not stages.first) >= first_guests
