"""A small model on stacks of other projects: torch's context_parallel and tensor parallelism.

`attend(q, k, v, position_ids)` is the attention of the model. Its tensors are (B, H, S, D) and have
the tokens of this rank.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as attention
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Layout, parity
from seqpar.integrations.flash_attn import flash_attn_func
from seqpar.parity.sharding import positions_of
from tests.support.parity import Ring, wrapped
from tests.support.ranks import device_mesh

TOKENS, WIDTH, HEADS, VOCABULARY = 32, 32, 2, 29


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, position_ids, attend):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v, position_ids).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


def causal(q, k, v, position_ids):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_documents(q, k, v, position_ids):
    """Compute attention within documents, which begin where positions are 0."""
    number = (position_ids == 0).cumsum(1)
    seen = (number[:, :, None] == number[:, None]).tril()
    return F.scaled_dot_product_attention(q, k, v, seen[:, None])


def on_gathered_keys(group):
    def gather(x):
        return Ring.apply(x, group, False)

    def attend(q, k, v, position_ids):
        k, v = (gather(part.transpose(1, 2)).transpose(1, 2) for part in (k, v))
        seen = position_ids[:, :, None] >= gather(position_ids)[:, None]
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen[:, None], -torch.inf)
        return scores.softmax(-1) @ v

    return attend


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.at = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, position_ids, attend=causal):
        x = self.embed(input_ids) + self.at(position_ids)
        for block in self.blocks:
            x = block(x, position_ids, attend)
        return self.head(x)


def inputs():
    torch.manual_seed(3)
    model, ids = Model(), torch.randint(0, VOCABULARY, (2, TOKENS))
    positions = torch.arange(TOKENS).expand(2, -1).clone()
    return model, ids, positions, F.pad(ids[:, 1:], (0, 1), value=-100)


def loss_of(logits, labels, count):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def one_rank(folder, attend=causal, documents=(), dtype=torch.float32, steps=False):
    model, ids, positions, labels = inputs()
    model, positions = model.to(dtype), positions_in(documents, positions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with parity.record(folder, model):
        loss_of(model(ids, positions, attend), labels, (labels >= 0).sum()).backward()
        if steps:
            optimizer.step()


def positions_in(documents, positions):
    """Return positions that begin at 0 again where a document begins."""
    for start in documents:
        positions[:, start:] = torch.arange(TOKENS - start)
    return positions


def sharded(group, folder, order, attend, documents=(), dtype=torch.float32):
    """Run a step in which the ranks of a group hold the tokens in a named order."""
    model, ids, positions, labels = inputs()
    count, ranks = (labels >= 0).sum(), dist.get_world_size(group)
    model, positions = model.to(dtype), positions_in(documents, positions)
    at = positions_of(order, [TOKENS // ranks] * ranks)[dist.get_rank(group)]
    with parity.record(folder, model, group, layout=order):
        logits = model(ids[:, at], positions[:, at], attend)
        (loss_of(logits, labels[:, at], count) * ranks).backward()
        average(model, group)


def average(model, group):
    for x in model.parameters():
        gradient = x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)


def flash_attn(group, folder, how):
    """Run our functions with flash-attn's names, in a wrapped, checkpointed or compiled model.

    With tensor parallelism, 2 of 4 ranks share each sequence.
    """
    model = inputs()[0]
    network, averages = model, how not in ("DDP", "FSDP2")
    if how == "tensor parallelism":
        mesh = device_mesh(2, 2, names=("cp", "tp"))
        group = mesh.get_group("cp")
        divide_features(model, mesh["tp"])
    if how == "checkpointing":
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if how == "compile":
        for block in model.blocks:
            block.compile(backend="eager")
    if not averages:
        network = wrapped(model, how, group)
    layout = Layout.zigzag(TOKENS, dist.get_world_size(group))

    def attend(q, k, v, _):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, causal=True, layout=layout, group=group).transpose(1, 2)

    _, ids, positions, labels = inputs()
    count, rank = (labels >= 0).sum(), dist.get_rank(group)
    ids, positions, labels = (layout.shard(x, rank, 1) for x in (ids, positions, labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with parity.record(folder, network, group, layout=layout):
        loss = loss_of(network(ids, positions, attend), labels, count)
        (loss * dist.get_world_size(group)).backward()
        if averages:
            average(model, group)
        optimizer.step()


class WithUnused(nn.Module):
    """The model and parameters that no forward uses."""

    def __init__(self, model):
        super().__init__()
        self.model, self.unused = model, nn.Linear(3, 3, bias=False)

    def forward(self, *arguments):
        return self.model(*arguments)


def with_unused_parameters(group, folder):
    """Run one step of AdamW under DDP that looks for unused parameters.

    If `group` is None, there is one process and no DDP.
    """
    model, ids, positions, labels = inputs()
    network = model = WithUnused(model)
    count, ranks, options, attend = (labels >= 0).sum(), 1, {}, causal
    if group is not None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        ids, positions, labels = (x.chunk(ranks, 1)[rank] for x in (ids, positions, labels))
        network = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        options, attend = {"layout": "contiguous"}, on_gathered_keys(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with parity.record(folder, network, group, **options):
        (loss_of(network(ids, positions, attend), labels, count) * ranks).backward()
        optimizer.step()


def torch_context_parallel(group, folder, averages=True):
    """Run a step in which torch's `context_parallel` cuts the batch.

    It replaces SDPA only on a GPU, so the model gathers keys itself here. `torch_ring` tests the
    ring.
    """
    model, ids, positions, labels = inputs()
    count, ranks = (labels >= 0).sum(), dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    buffers = [ids, positions, labels]
    with (
        context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)
        ),
        parity.record(folder, model, group),
    ):
        logits = model(ids, positions, on_gathered_keys(group))
        (loss_of(logits, labels, count) * ranks).backward()
        if averages:
            average(model, group)


class TorchRing(torch.autograd.Function):
    """The ring of torch's `context_parallel`, with SDPA's operators for a CPU."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ctx.group = group
        out, lse = attention._templated_ring_attention(group, 2, operator, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        def operator(query, key, value, out, logsumexp, is_causal, grad_out):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, logsumexp, 0.0, is_causal
            )

        q, k, v, out, lse = ctx.saved_tensors
        gradients = attention._templated_ring_attention_backward(
            ctx.group, 2, operator, gradient, "grad_out", q, k, v, out, lse, is_causal=True
        )
        return *gradients[:3], None


def torch_ring(group, folder):
    sharded(group, folder, "head_tail", lambda q, k, v, _: TorchRing.apply(q, k, v, group))


def seqpar_context_parallel(group, folder):
    """Run a step in which our `context_parallel` replaces SDPA in the model."""
    model, ids, positions, labels = inputs()
    count, ranks = (labels >= 0).sum(), dist.get_world_size(group)
    layout = Layout.zigzag(TOKENS, ranks)
    ids, positions, labels = (
        layout.shard(x, dist.get_rank(group), 1) for x in (ids, positions, labels)
    )
    with (
        seqpar.context_parallel(group, layout),
        parity.record(folder, model, group, layout=layout) as recorder,
    ):
        loss = loss_of(model(ids, positions), labels, count) * ranks
        recorder.loss(loss)  # the recording does not see the backward of this context
        loss.backward()
        average(model, group)


def divide_features(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel(group, folder):
    """Run a step in which each rank has all tokens and a part of the MLPs' features."""
    model, ids, positions, labels = inputs()
    divide_features(model, DeviceMesh.from_group(group, "cpu"))
    with parity.record(folder, model, group):
        loss_of(model(ids, positions), labels, (labels >= 0).sum()).backward()
