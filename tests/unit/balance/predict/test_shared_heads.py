"""Plans for ranks of a node that share attention's heads: for `USPAttention`."""

from dataclasses import replace

import numpy as np
import pytest

from seqpar import balance
from seqpar.balance.predict.shared_heads import SharedHeads
from tests.support.cases import Case, assert_right, grid, oracle, run
from tests.support.ranks import virtual
from tests.unit.balance.methods.test_methods import MODEL, cluster, documents
from tests.unit.balance.test_plan import assert_whole

METHODS = (*balance.METHODS, "auto")
LENGTHS = [700, 3, 0, 150, 40, 260, 1]


@pytest.mark.parametrize("method", METHODS)
def test_attention_with_a_plans_layouts_is_exact(method):
    plan = balance.plan(LENGTHS, cluster("2x2-h100"), MODEL, capacity=300, method=method, heads=2)
    assert_whole(plan, LENGTHS, 300)
    for batch in plan.micro_batches:
        rows = batch.tokens.reshape(2, 2)
        assert (np.ptp(rows, axis=1) <= 1).all() and np.array_equal(
            batch.seconds[::2], batch.seconds[1::2]
        )
        case = Case("usp", batch.layout, causal=True, dlse=True, heads=2, dim=4, value_dim=4)
        assert_right(virtual(4, run, case)[0], oracle(case), case.dtype)


@pytest.mark.parametrize("method", ["bytescale", "zeppelin", "auto"])
def test_predicted_bytes_are_those_that_usp_sends(method):
    """But for tokens that do not divide by the ranks of a row."""
    lengths = [9000, 5000, 700, 300, 150, 40]
    shape = cluster("2x2-h100")
    plan = balance.plan(lengths, shape, MODEL, capacity=5000, method=method, heads=2)
    for batch in plan.micro_batches:
        sent = virtual(4, _traffic, batch.layout)
        assert np.allclose(batch.bytes, len(MODEL.layers) * np.array(sent), rtol=2e-3)


def _traffic(comm, layout):
    import torch

    from seqpar import USPAttention

    tokens = layout.tokens_on(comm.rank)
    q = torch.empty(tokens, MODEL.heads, MODEL.head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(tokens, MODEL.kv_heads, MODEL.head_dim, dtype=torch.bfloat16, device="meta")
    rows = USPAttention(grid(comm)).traffic(q, k, k, layout, causal=True)
    return sum(row.bytes for row in rows)


def test_shared_heads_send_less_between_nodes():
    """Each rank sends its heads alone, where slow links would leave a ring's messages bare."""
    lengths, shape = [500000, *documents(8192, 40)], cluster("4x8-a800")
    between = replace(shape.between, rate=0.75 * shape.between.rate)
    shape = replace(shape, between=between)
    call = lengths, shape, balance.Model.preset("llama-7b")
    ring, shared = (balance.plan(*call, capacity=40000, heads=heads) for heads in (1, 8))
    assert shared.seconds < 0.75 * ring.seconds
    assert shared.bound == ring.bound and shared.share <= 1
    (one,), (two,) = ring.micro_batches, shared.micro_batches
    assert two.bytes.sum() < one.bytes.sum() / 2


def test_each_rank_of_a_group_has_costs():
    alone = balance.Costs(cluster("2x8-h100"), MODEL)
    shared = SharedHeads(cluster("2x8-h100"), MODEL, 4)
    assert shared.cluster.ranks == 4
    tokens = 2**20
    assert shared.span_work(0, tokens) == pytest.approx(alone.span_work(0, tokens) / 4)
    assert shared.kv_bytes(tokens) == alone.kv_bytes(tokens) / 4
    assert shared.kept_bytes(tokens) == alone.kept_bytes(tokens) / 4
    exchanged = float(shared.exchange_bytes(tokens))
    assert exchanged == pytest.approx(float(alone.attention_bytes(tokens)) / 4 * 3 / 4)
    linear = float(alone.tokenwise(tokens / 4)) + exchanged / alone.cluster.inside.rate
    assert shared.tokenwise(tokens) == pytest.approx(linear)


def test_memory_is_kept_with_offload():
    plan = balance.plan(
        [300000, *[400] * 50], cluster("2x4-h100"), MODEL, capacity=16384, heads=4, offload=1.0
    )
    for batch in plan.micro_batches:
        held = batch.tokens * (1 - batch.offload * (1 - 2 / len(MODEL.layers)))
        assert held.max() <= 16384 + 1 and batch.tokens.max() > 16384


@pytest.mark.parametrize(("lengths", "capacity"), [([16], 2), ([16], 3), ([7, 2, 2], 1), ([50], 7)])
@pytest.mark.parametrize("heads", [2, 4])
def test_offload_keeps_each_rank_within_capacity(lengths, capacity, heads):
    call = {"capacity": capacity, "heads": heads, "checkpointing": "full", "offload": 0.3}
    plan = balance.plan(lengths, cluster("2x4-a800"), balance.Model.preset("llama-8b"), **call)
    for batch in plan.micro_batches:
        held = batch.tokens * (1 - batch.offload * (1 - 2 / 32))
        assert held.max() <= capacity * (1 + 1e-9) and batch.offload.max() <= 0.3
        assert not batch.offload[batch.tokens <= capacity].any()


def test_plans_say_so_and_json_keeps_it():
    plan = balance.plan(LENGTHS, cluster("2x2-h100"), MODEL, capacity=300, heads=2)
    assert plan.heads == 2 and "heads shared by 2" in str(plan)
    assert balance.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"heads": 0}, "heads must be at least 1"),
        ({"heads": 3}, "heads must divide a node's devices, 8, got 3"),
        ({"heads": 16}, "heads must divide a node's devices"),
        ({"heads": 8, "model": "qwen3-next-80b"}, "heads must divide the model's KV heads"),
        ({"heads": 2, "model": "qwen3-next-80b"}, "heads must be 1 for a model with linear layers"),
        ({"heads": 2, "remap": True}, "remap must be False with heads"),
        ({"lengths": [2000], "heads": 2}, "at most 1600, the capacity of all 16 ranks"),
    ],
)
def test_wrong_arguments_are_named(changes, named):
    call = {"lengths": [5], "model": "llama-8b"} | changes
    call["model"] = balance.Model.preset(call["model"])
    with pytest.raises(ValueError, match=named):
        balance.plan(cluster=cluster("2x8-h100"), capacity=100, **call)
