"""What each method is for: balance, few bytes, thresholds, speed."""

import time

import numpy as np
import pytest

from seqpar import balance
from seqpar.balance.methods.greedy import partition, power_of_two
from seqpar.balance.methods.zeppelin import place as zeppelin
from seqpar.balance.predict.batch import DocumentBatch

MODEL = balance.Model.preset("llama-8b")


def cluster(name="4x8-h100"):
    return balance.Cluster.preset(name)


def documents(context, ranks, seed=0):
    """Documents like those of a long-context mix: as many tokens as ranks have contexts."""
    drawn = np.random.default_rng(seed).lognormal(np.log(context / 40), 1.6, 40 * ranks)
    lengths = drawn.astype(int).clip(1, context)
    return lengths[np.cumsum(lengths) <= context * ranks]


def batch_of(lengths, capacity, name="4x8-h100", model=MODEL):
    return DocumentBatch.of(np.array(lengths), balance.Costs(cluster(name), model), capacity)


def ranks_of(pieces):
    """The ranks of each document."""
    return {
        int(d): set(pieces.ranks[pieces.documents == d].tolist())
        for d in np.unique(pieces.documents)
    }


@pytest.mark.parametrize(("context", "limit"), [(131072, 1.02), (524288, 1.05)])
def test_auto_is_near_the_bound_and_fastest(context, limit):
    lengths = documents(context, 32)
    capacity = int(1.25 * context)
    plans = {
        method: balance.plan(lengths, cluster(), MODEL, capacity=capacity, method=method)
        for method in (*balance.METHODS, "auto")
    }
    best = plans.pop("auto")
    assert best.seconds <= limit * best.bound
    assert best.seconds <= min(plan.seconds for plan in plans.values())
    assert best.seconds < plans["zigzag"].seconds < plans["contiguous"].seconds


@pytest.mark.parametrize(("count", "seed"), [(5, 0), (17, 1), (17, 2), (60, 3)])
def test_auto_is_fastest_for_few_long_documents(count, seed):
    """Zigzag for all is then nearly even, and so has to be what it is compared with."""
    lengths = np.random.default_rng(seed).lognormal(12, 1, count).astype(int)
    call = lengths, cluster("1x8-h100"), MODEL
    seconds = {
        method: balance.plan(*call, capacity=2**22, method=method).seconds
        for method in (*balance.METHODS, "auto")
    }
    assert seconds["auto"] <= min(seconds.values())


@pytest.mark.parametrize("method", ["zeppelin", "bytescale", "power_of_two"])
def test_no_document_is_cut_finer_than_a_tile(method):
    lengths = [100, 200, 300, 5000, 70, 40000]
    plan = balance.plan(lengths, cluster(), MODEL, capacity=20000, method=method)
    (batch,) = plan.micro_batches
    found = {}
    for rank in range(32):
        for span in batch.layout.spans(rank):
            found[span.document, rank] = (
                found.get((span.document, rank), 0) + span.stop - span.start
            )
    for (document, _), tokens in found.items():
        assert tokens >= min(128, batch.lengths[document])


def test_a_hybrid_models_plan_is_another_one():
    lengths = documents(131072, 16)
    hybrid = balance.Model.preset("qwen3-next-80b")
    plans = [
        balance.plan(lengths, cluster("2x8-h100"), model, capacity=200000)
        for model in (MODEL, hybrid, balance.Model.preset("gemma3-12b"))
    ]
    assert len({plan.digest for plan in plans}) == 3
    assert len({plan.bound for plan in plans}) == 3


def test_documents_are_in_the_order_of_the_queues():
    lengths = [500, 200000, 3000, 60000, 700] + [9000] * 30
    plan = balance.plan(lengths, cluster("2x2-h100"), MODEL, capacity=300000, method="zeppelin")
    (batch,) = plan.micro_batches
    nodes = [set() for _ in lengths]
    ranks = [set() for _ in lengths]
    for rank in range(4):
        for span in batch.layout.spans(rank):
            nodes[span.document].add(rank // 2)
            ranks[span.document].add(rank)
    zones = [(len(n) > 1) + (len(r) > 1) for n, r in zip(nodes, ranks, strict=True)]
    assert zones == sorted(zones, reverse=True) and set(zones) == {0, 2}


def test_zeppelin_has_three_zones():
    found = ranks_of(zeppelin(batch_of([400000, *[30000] * 8, *[300] * 600], 200000, "2x8-h100")))
    assert found[0] == set(range(16))
    for document in range(1, 9):
        assert len({rank // 8 for rank in found[document]}) == 1
    assert all(len(found[document]) == 1 for document in range(9, 609))


def test_zeppelins_threshold_drops_where_a_bucket_overflows():
    """Two documents of three are whole on two devices of a node; the third one finds no room."""
    slow = balance.Link(latency=1.0, rate=1e3)
    from dataclasses import replace

    costs = balance.Costs(replace(cluster("1x2-h100"), inside=slow), MODEL)
    roomy, tight = (
        DocumentBatch.of(np.full(3, 1000), costs, capacity) for capacity in (2000, 1600)
    )
    assert [len(x) for x in ranks_of(zeppelin(roomy)).values()] == [1, 1, 1]
    assert sorted(len(x) for x in ranks_of(zeppelin(tight)).values()) == [1, 1, 2]


def test_rings_hide_messages_where_work_crosses_them():
    """Fast links hide shorter documents; no work of linear layers hides keys."""
    hides = batch_of([1], 10).hidden_share
    slower = batch_of([1], 10, "4x8-a800").hidden_share
    assert 128 <= hides["inside"] < hides["between"] < 2000
    assert hides["between"] < slower["between"]
    window = balance.Model.preset("mistral-7b")
    assert np.isinf(batch_of([1], 10, model=window).hidden_share["inside"])


def test_powers_of_two_are_aligned():
    lengths = [300000, 90000, 50000, 30000, *[4000] * 20]
    for document, ranks in ranks_of(power_of_two(batch_of(lengths, 100000, "3x4-h100"))).items():
        size = len(ranks)
        assert size & (size - 1) == 0, document
        assert ranks == set(range(min(ranks), min(ranks) + size)) and min(ranks) % size == 0


def test_bytescale_needs_no_power_of_two():
    lengths = [100000, *[2000] * 400]
    plan = balance.plan(lengths, cluster(), MODEL, capacity=10**6, method="bytescale")
    (batch,) = plan.micro_batches
    held = [any(s.document == 0 for s in batch.layout.spans(rank)) for rank in range(32)]
    assert sum(held) & (sum(held) - 1)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_largest_differences_beat_longest_first(ranks):
    """Karmarkar and Karp's example: 8, 7, 6, 5, 4 differ by 2 over two sets, longest first by 4."""
    assert sorted(
        sum([8, 7, 6, 5, 4][i] for i in s) for s in partition(np.array([8.0, 7, 6, 5, 4]), 2)
    ) == [14, 16]
    weights = np.random.default_rng(0).lognormal(0, 1, 200)
    sets = partition(weights, ranks)
    assert sorted(np.concatenate(sets).tolist()) == list(range(200)) and len(sets) == ranks
    sums = [weights[x].sum() for x in sets]
    assert max(sums) - min(sums) < 0.01 * max(sums)


@pytest.mark.parametrize(
    ("name", "count", "seconds"), [("64x8-h100", 6000, 0.02), ("512x8-h100", 100000, 0.5)]
)
def test_planning_is_fast(name, count, seconds):
    """Times are the process's; the limit is five times the promise, since tests share a machine."""
    lengths = np.random.default_rng(0).lognormal(8, 1.5, count).astype(int).clip(1, 131072)
    capacity = int(1.25 * lengths.sum() / cluster(name).ranks)
    took = []
    for _ in range(3):
        begin = time.process_time()
        plan = balance.plan(lengths, cluster(name), MODEL, capacity=max(capacity, 40000))
        took.append(time.process_time() - begin)
    assert min(took) < 5 * seconds
    assert plan.share > 0.95


def test_one_rank_has_whole_documents_with_every_method():
    """Windows of two spans that touch would be predicted to take less than those of one."""
    model = balance.Model.preset("gpt-oss-20b")
    for method in (*balance.METHODS, "auto"):
        plan = balance.plan([256] * 4, cluster("1x1-h100"), model, capacity=1024, method=method)
        assert plan.seconds == pytest.approx(plan.bound, rel=1e-12)
