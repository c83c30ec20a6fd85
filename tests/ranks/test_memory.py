"""Chunked heads and MLPs have the gradients of one process without chunks, however sharded."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from seqpar.memory import chunked_cross_entropy, tiled

TOKENS, CHANNELS, WORDS = 22, 8, 30


class Model(nn.Module):
    """An embedding that is also the head, and two MLPs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, CHANNELS)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(CHANNELS, 16), nn.GELU(), nn.Linear(16, CHANNELS))
            for _ in range(2)
        )

    def forward(self, tokens, labels, chunk=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        if chunk is not None:
            return chunked_cross_entropy(x, self.embedding.weight, labels, chunk)
        z = x @ self.embedding.weight.T
        return nn.functional.cross_entropy(z, labels, reduction="sum")


def largest_error(group, kind):
    """The largest difference of a parameter's gradient from that of one process."""
    torch.manual_seed(0)
    plain = Model().double()
    tokens, labels = (torch.randint(0, WORDS, (2, TOKENS)) for _ in range(2))
    labels[0, :5] = -100
    model = copy.deepcopy(plain)
    sum(map(plain, tokens, labels)).backward()
    for layer in model.layers:
        tiled(layer, 5)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if kind == "ddp":
        wrapped = DistributedDataParallel(model, process_group=group)
    elif kind == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model, process_group=group, use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    (size * wrapped(tokens[rank], labels[rank], chunk=4)).backward()
    gathered = nullcontext()
    if kind == "fsdp1":
        gathered = FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True)
    errors = []
    with gathered:
        for x, y in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = x.grad.full_tensor() if kind == "fsdp" else x.grad
            errors.append((gradient - y.grad).abs().max().item())
    return max(errors)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp1"])
def test_gradients_are_those_of_one_process(pool, kind):
    assert max(pool(2, largest_error, kind)) <= 1e-12


def tensor_parallel_errors(group):
    """The largest differences of a sharded MLP's result and gradients from the whole MLP's."""
    torch.manual_seed(0)
    plain = Model().double().layers[0]
    layer = tiled(copy.deepcopy(plain), 5)
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(TOKENS, CHANNELS, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, expected = layer(x), plain(y)
    for result in (out, expected):
        result.square().sum().backward()
    found = [out, x.grad, *(p.grad.full_tensor() for p in layer.parameters())]
    wanted = [expected, y.grad, *(p.grad for p in plain.parameters())]
    return [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]


def test_tensor_parallel_modules_have_the_gradients_of_one_process(pool):
    assert max(map(max, pool(2, tensor_parallel_errors))) <= 1e-12
