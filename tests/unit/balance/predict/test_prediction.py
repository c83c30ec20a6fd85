"""predict: messages hide under work, unless the cores that work move them."""

from dataclasses import replace

import pytest
import torch

from seqpar import balance, make_attention
from seqpar.simulate import Comm

MODEL = balance.Model.preset("llama-8b")
NODE = balance.Cluster.preset("1x2-h100")


def on(inside, overlaps):
    cluster = replace(NODE, inside=inside, overlaps=overlaps)
    return balance.plan([200_000], cluster, MODEL, capacity=200_000, method="zigzag").micro_batches


@pytest.mark.parametrize("overlaps", [True, False])
def test_messages_take_time_on_cores_that_copy_them(overlaps):
    link = balance.Link(1e-4, 1e10)
    (alone,) = on(balance.Link(0.0, 1e30), overlaps)
    (found,) = on(link, overlaps)
    calls = 2 * len(MODEL.layers)  # one message to the other rank in each, forward and backward
    moved = calls * link.latency + found.bytes.sum() / link.rate  # it receives what the other sends
    assert found.bytes.min() > 1e9
    expected = 0.0 if overlaps else moved
    assert found.seconds - alone.seconds == pytest.approx([expected] * 2, rel=1e-6, abs=1e-9)


def test_zeppelin_does_not_cut_without_hiding_messages():
    lengths, sent = [200_000, 20_000], []
    for overlaps in (True, False):
        cluster = replace(NODE, overlaps=overlaps)
        plan = balance.plan(lengths, cluster, MODEL, capacity=2**18, method="zeppelin")
        sent.append(sum(float(batch.bytes.sum()) for batch in plan.micro_batches))
    assert sent[0] > 0 and sent[1] == 0


@pytest.mark.parametrize(
    ("dtype", "where"),
    [("float64", "meta"), ("float32", "meta"), ("bfloat16", "meta"), ("bfloat16", "cpu")],
)
def test_bytes_are_those_of_ring_attention(dtype, where):
    """A CPU, whose kernels do not compute all tasks together, returns gradients in fp32."""
    attention = replace(NODE.device.attention, fused=where == "meta")
    cluster = replace(NODE, device=replace(NODE.device, dtype=dtype, attention=attention))
    plan = balance.plan([40_000, 3000], cluster, MODEL, capacity=40_000, method="zigzag")
    (batch,) = plan.micro_batches
    layout, expected = batch.layout, []
    for rank in range(cluster.ranks):
        attn = make_attention("ring", Comm("ring", rank, cluster.ranks))
        q, k, v = (
            torch.empty(
                layout.tokens_on(rank), heads, MODEL.head_dim, dtype=getattr(torch, dtype),
                device=where, requires_grad=True,
            )
            for heads in (MODEL.heads, MODEL.kv_heads, MODEL.kv_heads)
        )  # fmt: skip
        rows = attn.traffic(q, k, v, layout, causal=True)
        expected.append(len(MODEL.layers) * sum(row.bytes for row in rows))
    assert batch.bytes.tolist() == expected
