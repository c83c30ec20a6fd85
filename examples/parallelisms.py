# torchrun --nproc-per-node 4 examples/parallelisms.py fsdp (no GPU needed)
"""Combine seqpar with DDP, FSDP2, tensor parallelism or a pipeline, on one DeviceMesh.

Each function trains the same model for one step on 4 ranks, and divides the tokens of a row among 2
of them. It returns the full gradients of this rank's parameters, which the program compares with
those of one process.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import seqpar

VOCABULARY, DIM, HEADS, LAYERS = 32, 32, 4, 2
CU_SEQLENS, BATCH = [0, 11, 29, 40], 2  # each of two rows has three documents
LABELS = BATCH * (40 - 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, width) for width in (DIM, DIM // 2, DIM // 2))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, attend):  # (batch, tokens, dim)
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, DIM // HEADS)) for f in (self.q, self.k, self.v))
        return x + self.out(attend(q, k, v).flatten(-2))


class Model(nn.Module):
    """A transformer, or a pipeline stage with some of its layers."""

    def __init__(self, layers=range(LAYERS)):
        super().__init__()
        torch.manual_seed(0)
        parts = {"tokens": nn.Embedding(VOCABULARY, DIM), "places": nn.Embedding(40, DIM)}
        parts |= {str(i): Block() for i in range(LAYERS)} | {"head": nn.Linear(DIM, VOCABULARY)}
        first, last = 0 in layers, LAYERS - 1 in layers
        kept = [*map(str, layers), *["tokens", "places"] * first, *["head"] * last]
        self.parts = nn.ModuleDict({name: parts[name] for name in kept})
        self.layers, self.attend, self.positions = layers, None, None

    def on(self, attn, layout):
        """Set the function for attention, and the positions of this rank's tokens."""
        self.attend = lambda q, k, v: attn(q, k, v, layout, causal=True)
        self.positions = layout.position_ids(attn.rank)
        return self

    def forward(self, x):
        if 0 in self.layers:
            x = self.parts["tokens"](x) + self.parts["places"](self.positions)
        for i in self.layers:
            x = self.parts[str(i)](x, self.attend)
        return self.parts["head"](x) if LAYERS - 1 in self.layers else x


def batch():
    """Return the global batch's ids and labels, (rows, tokens) each."""
    ids = torch.randint(VOCABULARY, (BATCH, 40), generator=torch.Generator().manual_seed(1))
    return ids, seqpar.shift_labels(ids, CU_SEQLENS)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / LABELS


def local_loss(model, rows, attn, layout):
    """Return the loss over this rank's tokens of these rows."""
    ids, labels = (layout.shard(x[rows], attn.rank, dim=1) for x in batch())
    return loss_of(model(ids), labels)


def gradients(model):
    whole = lambda x: x.full_tensor() if isinstance(x, DTensor) else x  # noqa: E731
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def ddp(strategy="ring"):
    """Train two replicas, each on one row of the batch, which is divided among 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "sp", "tp"))
    attn, layout = seqpar.make_attention(strategy, mesh["sp"]), seqpar.Layout.zigzag(CU_SEQLENS, 2)
    model = Model().on(attn, layout)
    parallel = DistributedDataParallel(model)  # averages over the ranks of dp and sp
    row = mesh["dp"].get_local_rank()
    (local_loss(parallel, slice(row, row + 1), attn, layout) * dist.get_world_size()).backward()
    return gradients(model)


def sharded_model(mesh):
    """Return a model with parameters sharded over sp and replicated over dp."""
    model = Model()
    for block in model.parts.values():
        fully_shard(block, mesh=mesh["dp", "sp"])
    return fully_shard(model, mesh=mesh["dp", "sp"])


def fsdp(strategy="ring"):
    """Train as in `ddp`, with sharded parameters."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "sp", "tp"))
    attn, layout = seqpar.make_attention(strategy, mesh["sp"]), seqpar.Layout.zigzag(CU_SEQLENS, 2)
    model = sharded_model(mesh).on(attn, layout)
    row = mesh["dp"].get_local_rank()
    (local_loss(model, slice(row, row + 1), attn, layout) * dist.get_world_size()).backward()
    return gradients(model)


def tp(strategy="ring"):
    """Train with tokens divided over sp and heads over tp; parameters are sharded over both."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "sp", "tp"))
    attn, layout = seqpar.make_attention(strategy, mesh["sp"]), seqpar.Layout.zigzag(CU_SEQLENS, 2)
    model = Model().on(attn, layout)
    heads = ColwiseParallel(use_local_output=False)  # attention takes DTensors, and returns them
    plan = {"q": heads, "k": heads, "v": heads, "out": RowwiseParallel()}
    for i in range(LAYERS):
        parallelize_module(model.parts[str(i)], mesh["tp"], plan)
        fully_shard(model.parts[str(i)], mesh=mesh["sp"])
    fully_shard(model, mesh=mesh["sp"])  # averages over sp
    (local_loss(model, slice(None), attn, layout) * mesh["sp"].size()).backward()
    return gradients(model)


def pipeline(strategy="ring"):
    """Train two stages of one layer, each on 2 ranks. Each row of the batch is a micro-batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "sp"))
    attn, layout = seqpar.make_attention(strategy, mesh["sp"]), seqpar.Layout.zigzag(CU_SEQLENS, 2)
    index = mesh["pp"].get_local_rank()
    model = Model(range(index, index + 1)).on(attn, layout)
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=BATCH, loss_fn=loss_of, scale_grads=False)
    ids, labels = (layout.shard(x, attn.rank, dim=1) for x in batch())
    schedule.step(ids) if index == 0 else schedule.step(target=labels)
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh["sp"].get_group())
    return gradients(model)


KINDS = {"ddp": ddp, "fsdp": fsdp, "tp": tp, "pipeline": pipeline}


def one_process():
    """Return the loss and all gradients of one process, which attends to each document by SDPA."""

    def attend(q, k, v):
        lengths = torch.tensor(CU_SEQLENS).diff().tolist()
        documents = zip(*(x.transpose(1, 2).split(lengths, 2) for x in (q, k, v)), strict=True)
        options = {"is_causal": True, "enable_gqa": True}
        parts = [F.scaled_dot_product_attention(*x, **options) for x in documents]
        return torch.cat(parts, 2).transpose(1, 2)

    model, (ids, labels) = Model(), batch()
    model.attend = attend
    model.positions = torch.cat([torch.arange(n) for n in torch.tensor(CU_SEQLENS).diff()])
    loss = loss_of(model(ids), labels)
    loss.backward()
    return loss, gradients(model)


def largest_error(kind, strategy="ring"):
    """Return the largest difference of this rank's gradients from one process's."""
    (_, expected), found = one_process(), KINDS[kind](strategy)
    return max(float((grad - expected[name]).abs().max()) for name, grad in found.items())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    error = largest_error(*sys.argv[1:])
    print(f"rank {dist.get_rank()}: gradients differ from one process's by {error:.1e}")
    assert error < 1e-6
    dist.barrier()
    dist.destroy_process_group()
