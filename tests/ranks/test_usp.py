"""USP on a real device mesh."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import seqpar
from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from tests.support.calls import local
from tests.support.ranks import device_mesh


def on_a_mesh(group, outer):
    """USP on a real mesh of all 4 ranks: the largest difference from Ulysses on them, of out and
    gradients."""
    layout = Layout.zigzag([0, 30, 31, 90], 4)
    results = []
    for attn in (
        seqpar.USPAttention(device_mesh(2, 2), outer),
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


@pytest.mark.parametrize("outer", ["ring", "all_gather", "token_ring", "mesh"])
def test_usp_on_a_mesh(pool, outer):
    assert max(pool(4, on_a_mesh, outer)) <= 1e-12


def against_one_device(group, ranks, strategy):
    """The largest difference from one device of out and gradients on a mesh of these ranks, and
    this process's rank in it."""
    mesh, size = DeviceMesh("cpu", torch.tensor(ranks)), torch.tensor(ranks).numel()
    attn = seqpar.make_attention(strategy, mesh)
    results = []
    for attention, rank, layout in (
        (attn, attn.rank, Layout.zigzag([0, 30, 31, 90], size)),
        (seqpar.RingAttention(Comm("one", 0, 1)), 0, Layout.zigzag([0, 30, 31, 90], 1)),
    ):
        inputs = [x.detach().requires_grad_() for x in local(layout, rank, heads=4, kv_heads=2)]
        out = attention(*inputs, layout, causal=True)
        out.square().sum().backward()
        results.append((layout, [out.detach(), *(x.grad for x in inputs)]))
    (layout, ours), (_, whole) = results
    expected = [layout.shard(x, attn.rank) for x in whole]
    differences = [float((x - y).abs().max()) for x, y in zip(ours, expected, strict=True)]
    differences += [float((layout.unshard(ours[0], mesh) - whole[0]).abs().max())]
    return max(differences), attn.rank


@pytest.mark.composes(
    "PyTorch",
    "USP and Mesh divide tokens over two dimensions: pass `mesh['nodes', 'gpus']`",
    context=4,
    equal="out and gradients",
)
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        *(([[0, 2], [1, 3]], "usp"), ([[3, 1], [0, 2]], "usp"), ([[3, 1], [0, 2]], "mesh")),
        ([2, 0, 3, 1], "ring"),
    ],
)
def test_the_layout_follows_unordered_mesh_ranks(pool, ranks, strategy):
    differences, in_mesh = zip(*pool(4, against_one_device, ranks, strategy), strict=True)
    assert max(differences) <= 1e-12
    assert [torch.tensor(ranks).flatten()[rank].item() for rank in in_mesh] == [0, 1, 2, 3]
