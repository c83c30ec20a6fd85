"""Find the longest batch that fits into a memory limit, and compare it with `seqpar.recommend`.

Two ranks of this machine train a decoder in fp32 on one causal document, with zigzag Ring, FSDP and
Adam. The memory of a step is the largest resident memory during the step, minus the resident memory
before the model exists. Bisection finds the longest document whose step needs at most the limit.
The predicted length is `longest` of `recommend`, for a device with this limit as its memory.
"""

from __future__ import annotations

import gc
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from benchmarks import harness
from benchmarks.block import Block
from benchmarks.network.emulated import Network
from benchmarks.simulate.peak_memory import SMALL, resident
from benchmarks.simulate.rehearsal import MALLOC
from seqpar import Layout, make_attention, recommend
from seqpar.costs.cluster import Cluster
from seqpar.costs.model import Layer, Model
from seqpar.memory import chunked_cross_entropy
from seqpar.simulate.recommendations.recommendation import Recommendation

RANKS, LAYERS, HEADS, DIM, FFN, VOCABULARY = 2, 8, 2, 64, 352, 1024
WIDTH = HEADS * DIM
GOAL = 0.03  # the largest error
STEP = 32  # tokens; bisection ends at this difference
CHUNK = 512  # rows of the loss
TOKENS = 2048  # of the batch for which `recommend` predicts the longest


class Decoder(nn.Module):
    """A decoder whose norms are fused on CPUs, as the account of activations assumes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(HEADS, HEADS, DIM, FFN) for _ in range(LAYERS))
        for layer in self.layers:
            layer.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Return the sum of the losses of (tokens,) ids, each of which is its own label."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, attend)
        return chunked_cross_entropy(x, self.head.weight, ids, chunk=CHUNK)


class Trainer:
    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        self.model = Decoder()
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.attention = make_attention("ring", dist.group.WORLD)

    def step(self, tokens: int) -> None:
        layout = Layout.zigzag([0, tokens], RANKS)
        ids = torch.arange(layout.tokens_on(dist.get_rank())) % VOCABULARY
        self.model(ids, lambda *x: self.attention(*x, layout, causal=True)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Trained(NamedTuple):
    trainer: Trainer
    before: int  # resident bytes before the model existed


@cache
def trained() -> Trained:
    """Make a model whose optimizer has its state."""
    Trainer().step(SMALL)  # imports and connects
    gc.collect()
    before = resident("VmRSS")
    trainer = Trainer()
    trainer.step(SMALL)
    return Trained(trainer, before)


def needed(tokens: int) -> int:
    """Return the bytes of a step of this rank at its peak, with those of the model."""
    trainer, before = trained()
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    trainer.step(tokens)
    return resident("VmHWM") - before


def recommended(limit: int, tokens: int) -> Recommendation:
    """Return the prediction for zigzag Ring. Times of the prediction mean nothing."""
    layers = (Layer("softmax", None, FFN, FFN),) * LAYERS
    model = Model("decoder", layers, WIDTH, HEADS, HEADS, DIM, VOCABULARY, gated=True, tied=False)
    cluster = Cluster.preset(f"1x{RANKS}-h100")
    device = replace(cluster.device, memory=float(limit), dtype="float32")
    cluster = replace(cluster, name="two cores", device=device, overlaps=False)
    ways = recommend(model, cluster, [tokens], simulate_all=True)
    (way,) = (x for x in ways if (x.strategy, x.layout_name) == ("ring", "zigzag"))
    if way.checkpointing != "none":
        raise ValueError(f"--mebibytes must suffice for {tokens} tokens, got {limit / 2**20:.0f}")
    return way


def bisected(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest number of tokens that fits, up to `STEP`."""
    most = guess * 4 // 5 // STEP * STEP
    while not fits(most):
        most = most * 4 // 5 // STEP * STEP
    least = guess * 6 // 5 // STEP * STEP
    while fits(least):
        most, least = least, least * 6 // 5 // STEP * STEP
    while least - most > STEP:
        middle = (most + least) // 2 // STEP * STEP
        most, least = (middle, least) if fits(middle) else (most, middle)
    return most


def measure(options: Namespace) -> harness.Results:
    os.environ |= MALLOC
    rows = []
    with Network("loopback", RANKS, timeout=600) as network:
        for mebibytes in options.mebibytes:
            rows.append(row_of(mebibytes * 2**20, lambda tokens: max(network(needed, tokens))))
    print(table(rows))
    reached = [abs(row["error"]) <= GOAL for row in rows]
    return {"rows": rows, "within_goal": sum(reached)}


def row_of(limit: int, needs: Callable[[int], int]) -> dict[str, Any]:
    predicted = recommended(limit, TOKENS).longest
    tried: dict[int, int] = {}

    def fits(tokens: int) -> bool:
        tried[tokens] = needs(tokens)
        print(f"{tokens:6,} tokens: {tried[tokens] / 2**20:.1f} MiB", flush=True)
        return tried[tokens] <= limit

    longest = bisected(fits, predicted)
    return {
        "limit": limit,
        "longest": longest,
        "predicted": predicted,
        "error": predicted / longest - 1,
        "tried": dict(sorted(tried.items())),
    }


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            f"{row['limit'] / 2**20:.0f}",
            *(f"{row[x]:,}" for x in ("longest", "predicted")),
            f"{row['error']:+.1%}",
        ]
        for row in rows
    ]
    return harness.table(["limit, MiB", "longest, tokens", "predicted, tokens", "error"], cells)


ARGUMENTS = {"--mebibytes": ([256, 384], "limits of a rank")}

if __name__ == "__main__":
    harness.run("longest-batch", __doc__, ARGUMENTS, measure, canary_is="none")
