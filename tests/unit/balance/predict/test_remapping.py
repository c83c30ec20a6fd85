"""Plans whose linear modules run on even tokens: attention is balanced by itself."""

import numpy as np
import pytest

from seqpar import balance
from seqpar.balance.predict.token_balance import remapping
from seqpar.costs.grid import causal_pairs
from tests.unit.balance.methods.test_methods import MODEL, cluster, documents
from tests.unit.balance.test_plan import assert_whole


def planned(context=8192, **options):
    lengths, capacity = documents(context, 32), int(1.25 * context)
    plan = balance.plan(lengths, cluster(), MODEL, capacity=capacity, **options)
    assert_whole(plan, lengths, capacity)
    return plan


def attention_imbalance(batch):
    """max/mean over ranks of the pairs that they compute."""
    pairs = []
    for rank in range(batch.layout.ranks):
        starts, stops = np.array([(s.start, s.stop) for s in batch.layout.spans(rank)]).T
        pairs.append(float(causal_pairs(starts, stops).sum()))
    return max(pairs) / np.mean(pairs)


def test_attention_and_the_step_are_both_near_optimal():
    plans = [planned(131072, remap=remap) for remap in (False, True)]
    (plain,), (remapped,) = (x.micro_batches for x in plans)
    assert attention_imbalance(remapped) <= 1.01 < attention_imbalance(plain)
    assert plans[1].share >= 1 / 1.02
    assert np.ptp(remapped.tokens) > 1000  # which linear modules do not see


@pytest.mark.parametrize("method", ["zeppelin", "wlb", "zigzag", "auto"])
def test_seconds_add_even_attention_and_moving_tokens(method):
    plan = planned(remap=True, method=method)
    (batch,), costs = plan.micro_batches, balance.Costs(cluster(), MODEL)
    even = -(-batch.tokens.sum() // 32)
    linear = sum(float(costs.tokenwise(even, way)) for way in (False, True))
    moving, _ = remapping(costs, batch.tokens)
    attention = np.zeros(32)
    for rank in range(32):
        starts, stops = np.array([(s.start, s.stop) for s in batch.layout.spans(rank)]).T
        attention[rank] = sum(costs.span_work(starts, stops, x).sum() for x in (False, True))
    least = attention + linear + 2 * moving
    # Messages of the keys, launches, and pieces that cost no less than their share come on top.
    assert (batch.seconds >= least * (1 - 1e-9)).all()
    if method == "wlb":  # whole documents send no keys
        calls = sum(costs.call_seconds(way) for way in (False, True))
        assert np.allclose(batch.seconds, least + calls, rtol=1e-9)


def test_what_is_moved_is_what_the_layouts_move():
    (batch,) = planned(remap=True).micro_batches
    costs = balance.Costs(cluster(), MODEL)
    even = balance.token_balanced(batch.layout, cluster())
    _, nbytes = remapping(costs, batch.tokens)
    for rank in range(32):
        moved = np.setxor1d(*(x.token_indices(rank) for x in (batch.layout, even))).size
        # Forward sends what is read or written of each, backward the gradients of the other.
        assert 2 * nbytes[rank] == pytest.approx(moved * float(costs.attention_bytes(1)))
    row = 2 * MODEL.heads + 2 * MODEL.kv_heads
    assert costs.attention_bytes(1) == row * MODEL.head_dim * 2 * len(MODEL.layers)


def test_plans_say_so_and_json_keeps_it():
    plan, plain = planned(remap=True, method="wlb"), planned(method="wlb")
    assert "linear modules on even tokens" in str(plan) and "even" not in str(plain)
    assert balance.Plan.from_json(plan.to_json()) == plan and plan.remap and not plain.remap
    same = [np.array_equal(a.documents, b.documents) for a, b in zip(
        plan.micro_batches, plain.micro_batches, strict=True
    )]  # fmt: skip
    assert plan.digest != plain.digest or not all(same)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"remap": "yes"}, "remap"),
        ({"remap": True, "offload": 0.5}, "offload must be 0 with remap"),
    ],
)
def test_wrong_arguments_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        balance.plan([5], cluster(), MODEL, capacity=10, **changes)
