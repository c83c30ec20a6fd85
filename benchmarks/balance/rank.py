"""One rank of `ranks.py`: it computes a planned step of a small model."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar import RingAttention, balance

HEADS, DIM, LAYERS, VOCABULARY = 8, 64, 2, 256
HIDDEN = HEADS * DIM
FFN = 3 * HIDDEN
MODEL = balance.Model.from_config(
    {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": FFN,
        "vocab_size": VOCABULARY,
    }
)


class Block(nn.Module):
    """A layer of attention and a gated MLP, as in Llama, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.gate_up, self.down = linear(HIDDEN, 2 * FFN), linear(FFN, HIDDEN)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(1, (3, HEADS, DIM)).unbind(1)
        x = x + self.out(attend(q, k, v).flatten(1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, 1)
        return x + self.down(F.silu(gate) * up)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


@functools.cache
def model() -> nn.ModuleDict:
    """Return the model, the same on all ranks."""
    torch.manual_seed(0)
    parts = {"embedding": nn.Embedding(VOCABULARY, HIDDEN), "head": linear(HIDDEN, VOCABULARY)}
    return nn.ModuleDict(parts | {"blocks": nn.ModuleList(Block() for _ in range(LAYERS))})


def loss_of(ids: Tensor, labels: Tensor, attend: Any) -> Tensor:
    """Return the sum of the tokens' losses."""
    parts = model()
    x = parts["embedding"](ids)
    for block in parts["blocks"]:
        x = block(x, attend)
    return F.cross_entropy(parts["head"](x), labels, reduction="sum")


def dataset(lengths: list[int]) -> list[Tensor]:
    """Return each document's tokens."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(VOCABULARY, (sum(lengths),), generator=generator).split(lengths))


@functools.cache
def local_step(text: str) -> list[dict[str, Any]]:
    """Return this rank's part of a plan in JSON."""
    plan = balance.Plan.from_json(text)
    lengths = np.zeros(1 + max(int(x.documents.max()) for x in plan.micro_batches), int)
    for batch in plan.micro_batches:
        lengths[batch.documents] = batch.lengths
    return balance.collate(plan, dataset(lengths.tolist()), dist.get_rank())


@functools.cache
def attention() -> RingAttention:
    """Return the attention of all ranks."""
    return RingAttention(dist.group.WORLD)


def step(text: str) -> dict[str, Any]:
    """Make a step of a plan. Returns this rank's loss, and seconds of each micro-batch.

    `clock` is wall-clock time from a barrier until this rank is done; `core` is its CPU time.
    """
    model().zero_grad()
    found: dict[str, Any] = {"loss": 0.0, "clock": [], "core": []}
    sent = attention().sent_bytes
    for local in local_step(text):
        attend = functools.partial(attention(), layout=local["layout"], causal=True)
        dist.barrier()
        clock, core = time.perf_counter(), time.process_time()
        loss = loss_of(local["input_ids"], local["labels"], attend) * local["loss_weight"]
        loss.backward()
        found["clock"].append(time.perf_counter() - clock)
        found["core"].append(time.process_time() - core)
        found["loss"] += loss.item()
    return found | {"bytes": attention().sent_bytes - sent}


def checked(text: str) -> tuple[Tensor, Tensor]:
    """Return the loss and all gradients of a step, summed over ranks."""
    loss = torch.tensor(step(text)["loss"])
    gradients = torch.cat([x.grad.flatten() for x in model().parameters() if x.grad is not None])
    dist.all_reduce(loss)
    dist.all_reduce(gradients)
    return loss, gradients


def expected(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return one process's loss and gradients, by PyTorch's attention on each document."""
    ids, edges = torch.cat(dataset(lengths)), [0, *itertools.accumulate(lengths)]
    labels = torch.cat([F.pad(x[1:], (0, 1), value=-100) for x in dataset(lengths)])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in itertools.pairwise(edges)]
        outputs = [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
        return torch.cat([out.transpose(0, 1) for out in outputs])

    model().zero_grad()
    loss = loss_of(ids, labels, attend) / int((labels >= 0).sum())
    loss.backward()
    gradients = [x.grad.flatten() for x in model().parameters() if x.grad is not None]
    return loss.detach(), torch.cat(gradients)
