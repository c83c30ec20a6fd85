"""USP on a real device mesh."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from seqpar import Layout


def on_a_mesh(group, outer):
    """USP on a real mesh of all 4 ranks: the largest difference from Ulysses on them, of out and
    gradients."""
    layout = Layout.zigzag([0, 30, 31, 90], 4)
    results = []
    for attn in (
        seqpar.USPAttention(init_device_mesh("cpu", (2, 2)), outer),
        seqpar.UlyssesAttention(group),
    ):
        comm = attn._bound.comm
        generator = torch.Generator().manual_seed(comm.rank)
        shapes = [(layout.tokens_on(comm.rank), heads, 8) for heads in (6, 3, 3)]
        q, k, v = (
            torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True)
            for s in shapes
        )
        out = attn(q, k, v, layout, causal=True)
        out.square().sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return max(float((x - y).abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("outer", ["ring", "all_gather", "token_ring"])
def test_usp_on_a_mesh(pool, outer):
    assert max(pool(4, on_a_mesh, outer)) <= 1e-12
