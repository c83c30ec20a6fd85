"""Micro-batches: as few as hold the documents, or so many that take equally long."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import balance
from seqpar.balance.planning.divide import as_few, even, steps_of_epoch, to_lightest
from seqpar.balance.predict.batch import DocumentBatch
from tests.support.tiers import examples, few_rows
from tests.unit.balance.methods.test_methods import MODEL, cluster, documents
from tests.unit.balance.test_plan import assert_whole

RANKS = "2x4-h100"


def seconds_of(plan):
    return np.array([batch.seconds.max(initial=0.0) for batch in plan.micro_batches])


@few_rows()
@pytest.mark.parametrize("method", ["bytescale", "auto"])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_micro_batches_of_a_pipeline_take_equally_long(count, method):
    lengths = documents(32768, 24)
    call = lengths, cluster(RANKS), MODEL
    plan = balance.plan(*call, capacity=400000, method=method, micro_batches=count)
    assert_whole(plan, lengths, 400000)
    seconds = seconds_of(plan)
    assert seconds.size == count
    assert seconds.max() <= 1.01 * seconds.min()


def test_work_is_even_where_tokens_are_not():
    """Documents of few tokens and much work beside short ones: the first micro-batch has both."""
    lengths = np.array([60000, *[500] * 400, 30000, 30000])
    batch = DocumentBatch.of(lengths, balance.Costs(cluster(RANKS), MODEL), 10**6)
    parts = even(batch, 2)
    work = [batch.weights[part].sum() for part in parts]
    tokens = [lengths[part].sum() for part in parts]
    assert max(work) < 1.01 * min(work) and max(tokens) > 1.1 * min(tokens)
    assert [part.size for part in as_few(batch)] == [lengths.size]


def test_an_oversized_document_has_its_own_micro_batch():
    lengths = [100000, *[1000] * 20]
    plan = balance.plan(lengths, cluster(RANKS), MODEL, capacity=20000, micro_batches=3)
    assert [batch.documents.tolist() for batch in plan.micro_batches if 0 in batch.documents] == [
        [0]
    ]


def test_there_may_be_fewer_documents_than_micro_batches():
    plan = balance.plan([700, 0, 30], cluster(RANKS), MODEL, capacity=500, micro_batches=5)
    assert_whole(plan, [700, 0, 30], 500)
    assert sorted(batch.documents.size for batch in plan.micro_batches) == [0, 0, 0, 1, 1]
    assert balance.Plan.from_json(plan.to_json()) == plan and "micro-batch" in str(plan)
    many = balance.plan([700, 0, 30], cluster(RANKS), MODEL, capacity=500, micro_batches=2**17)
    assert len(many.micro_batches) == 2**17 and many.seconds == plan.seconds
    empty = balance.plan([], cluster(RANKS), MODEL, capacity=500, micro_batches=2)
    assert len(empty.micro_batches) == 2 and empty.seconds == 0


def test_a_full_micro_batch_gets_no_more():
    lengths = np.random.default_rng(0).integers(1, 3000, 200)
    for count in (4, 5, 9):
        capacity = int(1.02 * lengths.sum() / (8 * count)) + 1
        call = lengths, cluster(RANKS), MODEL
        plan = balance.plan(*call, capacity=capacity, micro_batches=count)
        assert_whole(plan, lengths, capacity)
        assert len(plan.micro_batches) == count


@examples(30, 200)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=30), st.integers(1, 6))
def test_items_go_to_the_lightest_with_room(items, count):
    tokens, weights = np.array(items, float).reshape(-1, 2).T
    room = 1.2 * tokens.sum() / count + 2
    work, held, expected = [0.0] * count, [0.0] * count, []
    for taken, weight in zip(tokens, weights, strict=True):
        fit = [number for number in range(count) if held[number] + taken <= room]
        if not fit:
            expected = None
            break
        number = min(fit, key=lambda x: (work[x], x))
        work[number], held[number] = work[number] + weight, held[number] + taken
        expected.append(number)
    found = to_lightest(tokens, weights, count, room)
    assert (found if found is None else found.tolist()) == expected


def test_dealing_to_full_steps_takes_seconds():
    """In proportion to the documents: their product with the steps would take a minute."""
    lengths = np.random.default_rng(0).lognormal(7.5, 1.3, 80_000).astype(int) + 1
    lengths, begin = np.minimum(lengths, 2**17), time.process_time()
    steps = steps_of_epoch(lengths, 2**18, seed=0, epoch=0, deferral=1200)
    assert time.process_time() - begin < 8
    assert sorted(np.concatenate(steps)) == list(range(lengths.size))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"micro_batches": 0}, "micro_batches must be at least 1"),
        ({"micro_batches": 1.5}, "micro_batches"),
        ({"micro_batches": 2}, "micro_batches must be more than 2, .* their tokens fill 3"),
        ({"micro_batches": 9, "method": "contiguous"}, "micro_batches must be None with contig"),
    ],
)
def test_wrong_numbers_are_named(changes, named):
    call = [300] * 8, cluster("1x4-h100"), MODEL
    with pytest.raises(ValueError, match=named):
        balance.plan(*call, capacity=250, **changes)
