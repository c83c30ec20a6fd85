"""Micro-batches: as few as hold the documents, or so many that take equally long."""

import numpy as np
import pytest

from seqpar import balance
from seqpar.balance.planning.divide import as_few, even
from seqpar.balance.predict.batch import DocumentBatch
from tests.support.tiers import few_rows
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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"micro_batches": 0}, "micro_batches must be at least 1"),
        ({"micro_batches": 1.5}, "micro_batches"),
        ({"micro_batches": 2}, "micro_batches must be more than 2: .* tokens for 3"),
        ({"micro_batches": 9, "method": "contiguous"}, "micro_batches must be None with contig"),
    ],
)
def test_wrong_numbers_are_named(changes, named):
    call = [300] * 8, cluster("1x4-h100"), MODEL
    with pytest.raises(ValueError, match=named):
        balance.plan(*call, capacity=250, **changes)
