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

from benchmarks.block import Block
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


@functools.cache
def model() -> nn.ModuleDict:
    """Return the model, the same on all ranks."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    blocks = nn.ModuleList(Block(HEADS, HEADS, DIM, FFN) for _ in range(LAYERS))
    parts = {"embedding": nn.Embedding(VOCABULARY, HIDDEN), "head": head, "blocks": blocks}
    return nn.ModuleDict(parts)


def loss_of(ids: Tensor, labels: Tensor, attend: Any) -> Tensor:
    parts = model()
    x = parts["embedding"](ids)
    for block in parts["blocks"]:
        x = block(x, attend)
    return F.cross_entropy(parts["head"](x), labels, reduction="sum")


def dataset(lengths: list[int]) -> list[Tensor]:
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
