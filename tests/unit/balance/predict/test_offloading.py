"""Offloading: as many tokens as the published program allows, and no copy that is not hidden."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar import balance
from seqpar.balance.predict.batch import DocumentBatch, Offloading
from tests.support.tiers import few_rows
from tests.unit.balance.test_plan import assert_whole

MODEL = balance.Model.preset("llama-8b")
METHODS = [name for name in (*balance.METHODS, "auto") if name != "contiguous"]


def costs_of(name="2x4-h100"):
    return balance.Costs(balance.Cluster.preset(name), MODEL)


def forward_seconds(costs, layout, rank):
    """A rank's forward without messages and launches, from its spans alone."""
    starts, stops = np.array([(s.start, s.stop) for s in layout.spans(rank)]).T
    return float(costs.span_work(starts, stops).sum() + costs.tokenwise((stops - starts).sum()))


@few_rows()
@pytest.mark.parametrize("checkpointing", ["none", "attention", "full"])
@pytest.mark.parametrize("most", [0.3, 1.0])
@pytest.mark.parametrize("capacity", [3000, 16384])
def test_ranks_of_a_document_solve_the_published_program(capacity, most, checkpointing):
    """Against the least number of ranks for which some ratio fits and hides, tried one by one."""
    costs, layers = costs_of(), len(MODEL.layers)
    lengths = np.array([1, 128, 5000, 16384, 16385, 50000, 131072, 400000])
    offloading = Offloading.of(costs, capacity, most, checkpointing)
    batch = DocumentBatch.of(lengths, costs, capacity, offloading)
    rate = costs.cluster.host.rate
    for length, found in zip(lengths.tolist(), batch.least_ranks.tolist(), strict=True):
        act = float(costs.kept_bytes(length, checkpointing)) / layers
        room = layers * float(costs.kept_bytes(capacity, checkpointing)) / layers
        seconds = float(costs.span_work(0, length) + costs.tokenwise(length)) / layers
        for ranks in range(1, 1000):
            # The least ratio with which the document fits: 2·Act + (1 − r)(l − 2)·Act ≤ D·l·Act(C)
            ratio = max(0.0, 1 - (ranks * room - 2 * act) / ((layers - 2) * act))
            if ratio <= most and ratio * act / rate <= seconds * (1 + 1e-9):
                break
        assert found == ranks
    assert (batch.least_ranks <= -(-lengths // capacity)).all()
    if most == 1:  # long documents hide all copies: only two layers of 32 stay
        assert batch.least_ranks[-1] == -(-2 * lengths[-1] // (layers * capacity))


@pytest.mark.parametrize("method", METHODS)
def test_offload_fits_longer_documents_and_hides_copies(method):
    costs, capacity = costs_of(), 16384
    lengths = [300000, 200000, 70000, *[9000] * 8, *[400] * 90, 0, 1]
    call = lengths, costs.cluster, MODEL
    with pytest.raises(ValueError, match="document 0 has 300000 tokens"):
        balance.plan(*call, capacity=capacity, method=method)
    plan = balance.plan(*call, capacity=capacity, method=method, offload=1.0)
    assert_whole(plan, lengths, np.inf)
    copied = float(costs.kept_bytes(1)) / costs.cluster.host.rate
    free = 1 - 2 / len(MODEL.layers)
    for batch in plan.micro_batches:
        assert (batch.offload >= 0).all() and (batch.offload <= 1).all()
        assert (batch.tokens * (1 - batch.offload * free) <= capacity * (1 + 1e-9)).all()
        assert (batch.offload > 0).tolist() == (batch.tokens > capacity).tolist()
        for rank, ratio in enumerate(batch.offload.tolist()):
            seconds = forward_seconds(costs, batch.layout, rank)
            assert ratio * batch.tokens[rank] * copied <= seconds * (1 + 1e-3)
    assert max(batch.tokens.max() for batch in plan.micro_batches) > 2 * capacity
    assert "offloads up to" in str(plan)
    assert balance.Plan.from_json(plan.to_json()) == plan


def test_no_more_is_copied_than_memory_asks():
    lengths = np.random.default_rng(0).lognormal(8, 1.5, 200).astype(int)
    cluster = costs_of().cluster
    roomy = balance.plan(lengths, cluster, MODEL, capacity=int(lengths.sum()), offload=1.0)
    assert not any(batch.offload.any() for batch in roomy.micro_batches)
    assert "offloads" not in str(roomy)


def test_a_slow_host_link_hides_less():
    from dataclasses import replace

    costs = costs_of()
    slow = replace(costs.cluster, host=balance.Link(latency=0.0, rate=1e9))
    call = {"model": MODEL, "capacity": 16384, "offload": 1.0, "method": "bytescale"}
    lengths = [120000, *[5000] * 40]
    fast_plan, slow_plan = (balance.plan(lengths, x, **call) for x in (costs.cluster, slow))
    ratios = [max(b.offload.max() for b in p.micro_batches) for p in (fast_plan, slow_plan)]
    assert ratios[0] > 0.5 > ratios[1]
    assert len(slow_plan.micro_batches) >= len(fast_plan.micro_batches)


def test_an_exposed_copy_takes_its_time():
    """A rank that must copy more than its compute hides waits, forward and backward."""
    from seqpar.balance.methods.greedy import wlb
    from seqpar.balance.predict.prediction import predict

    costs, lengths = costs_of("1x1-h100"), np.array([20000])
    offloading = Offloading.of(costs, 10000, 1.0, "none")
    batch = DocumentBatch.of(lengths, costs, 10000, offloading)
    pieces = wlb(DocumentBatch.of(lengths, costs, 20000))
    found, free = predict(batch, pieces), predict(DocumentBatch.of(lengths, costs, 20000), pieces)
    copying = float(found.offload[0]) * 20000 * offloading.copy_seconds
    forward, backward = (
        float(costs.span_work(0, 20000, way) + costs.tokenwise(20000, way)) for way in (False, True)
    )
    assert copying > forward
    waits = copying - forward + max(copying - backward, 0)
    assert found.seconds[0] == pytest.approx(free.seconds[0] + waits, rel=1e-9)


def test_models_of_two_layers_offload_nothing():
    from dataclasses import replace

    small = replace(MODEL, layers=MODEL.layers[:2])
    with pytest.raises(ValueError, match="document 0 has 50000 tokens, 50000 of which stay"):
        balance.plan([50000], costs_of("1x4-h100").cluster, small, capacity=10000, offload=1.0)


@few_rows()
@pytest.mark.parametrize("most", [1e-9, 0.01, 1.0])
@pytest.mark.parametrize(
    ("lengths", "capacity"), [([], 1), ([1], 1), ([2], 2), ([8000], 1000), ([100] * 8, 100)]
)
def test_what_fits_without_offloading_fits_with_it(lengths, capacity, most):
    cluster = costs_of("1x8-h100" if sum(lengths) > 2 else "1x1-h100").cluster
    plan = balance.plan(lengths, cluster, MODEL, capacity=capacity, offload=most)
    assert len(plan.micro_batches) == min(len(lengths), 1)
    assert_whole(plan, lengths, np.inf)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"offload": -0.1}, "offload must be from 0 to 1"),
        ({"offload": 1.5}, "offload must be from 0 to 1"),
        ({"offload": float("nan")}, "offload must be from 0 to 1"),
        ({"offload": "half"}, "offload must be a number"),
        ({"offload": 0.5, "method": "contiguous"}, "offload must be 0 with contiguous"),
        ({"offload": 0.5, "checkpointing": "some"}, "checkpointing must be one of"),
        ({"lengths": [10**7], "offload": 1.0}, "document 0 has 10000000 tokens"),
    ],
)
def test_wrong_arguments_are_named(changes, named):
    arguments = {"lengths": [5], "cluster": costs_of().cluster, "model": MODEL, "capacity": 100}
    with pytest.raises(ValueError, match=named):
        balance.plan(**arguments | changes)


@settings(max_examples=40)
@given(st.data())
def test_memory_is_kept_whatever_fits(data):
    nodes, devices = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]))
    cluster = costs_of(f"{nodes}x{devices}-h100").cluster
    capacity, most = data.draw(st.sampled_from([2, 300, 2000])), data.draw(st.floats(0.01, 1))
    longest = (capacity - 1) * nodes * devices
    lengths = data.draw(st.lists(st.integers(0, longest), max_size=12))
    call = {"capacity": capacity, "offload": most, "method": data.draw(st.sampled_from(METHODS))}
    plan = balance.plan(lengths, cluster, MODEL, **call)
    assert_whole(plan, lengths, np.inf)
    for batch in plan.micro_batches:
        assert (batch.offload <= most).all()
        held = batch.tokens * (1 - batch.offload * (1 - 2 / len(MODEL.layers)))
        assert (held <= capacity * (1 + 1e-9)).all()
