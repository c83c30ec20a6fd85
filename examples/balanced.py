"""Documents of uneven length, as in pretraining, balanced over the ranks.

The documents of a step have --seq-len tokens in total, and the longest document has at most half of
these tokens. Document lengths follow DistCA's "Pretrain" sample, scaled to this size. While a step
is computed, `balance.Batches` plans and reads the next step. The documents of a step do not depend
on the number of ranks.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from data import Step
from model import Transformer

from seqpar import balance
from seqpar.costs import Layer, Recurrence

LENGTHS = Path(__file__).parents[1] / "benchmarks/data/length_distributions.json"


class Documents:
    """A text that is cut into consecutive documents of these lengths.

    The text is a tensor, so the process of `balance.Batches` shares it instead of copying it.
    """

    def __init__(self, text: torch.Tensor, lengths: list[int]) -> None:
        self._text, self._edges = text, [0, *itertools.accumulate(lengths)]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._text[self._edges[index] : self._edges[index + 1]]


class Balanced:
    """Endless steps, each planned for the current number of ranks."""

    def __init__(
        self, contents: list[bytes], options: argparse.Namespace, model: balance.Model
    ) -> None:
        ranks = dist.get_world_size()
        text = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
        lengths = uneven_lengths(len(text), options.seq_len)
        self._documents = Documents(text, lengths)
        planner = partial(
            balance.plan,
            cluster=replace(cluster_of_all(options.cluster), nodes=1, devices_per_node=ranks),
            model=model,
            capacity=options.capacity or -(-options.seq_len * 5 // (4 * ranks)),
            method=options.balance,
        )
        self._batches = balance.Batches(lengths, planner, tokens=options.seq_len)
        self.state_dict = self._batches.state_dict
        self.load_state_dict = self._batches.load_state_dict

    def __iter__(self) -> Iterator[Step]:
        while True:  # once per epoch
            for plan, local in self._batches.read(self._documents, dist.get_rank()):
                tokens = sum(int(batch.tokens.sum()) for batch in plan.micro_batches)
                yield Step(local, tokens, figures(plan))


def uneven_lengths(tokens: int, step: int) -> list[int]:
    """Return document lengths from the published sample, with this number of tokens in total.

    A document has at most half of the tokens of a step.
    """
    values = json.loads(LENGTHS.read_text())["distributions"]["pretrain"]
    published = np.array(values["quantiles_at_0_to_1_step_0.001"])
    scaled = np.ceil(published * (step / 2 / published.max())).astype(int)
    enough = np.tile(scaled, -(-tokens // scaled.sum()))
    ends = np.cumsum(np.random.default_rng(0).permutation(enough)).clip(max=tokens)
    return [length for length in np.diff(ends, prepend=0).tolist() if length]


def cluster_of_all(path: Path | None) -> balance.Cluster:
    """Return the cluster of rank 0, because all ranks must plan with the same cluster."""
    found = [None]
    if dist.get_rank() == 0:
        found = [balance.Cluster.from_json(path) if path else balance.Cluster.here()]
    dist.broadcast_object_list(found)
    return found[0]


def cost_model(model: Transformer) -> balance.Model:
    """Return the planner's description of a model."""
    softmax, linear = (
        next((layer for layer in model.layers if layer.kind == kind), None)
        for kind in ("softmax", "linear")
    )
    layers = tuple(
        Layer(x.kind, None, x.down.in_features, x.down.in_features) for x in model.layers
    )
    heads, kv_heads, _ = (softmax or linear).split
    vocabulary, hidden = model.embedding.weight.shape
    shape = (linear.split[1],) * 2 + (linear.head_dim,) * 2 if linear else ()
    return balance.Model(
        name=type(model).__name__,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=(softmax or linear).head_dim,
        vocabulary=vocabulary,
        recurrence=Recurrence(*shape) if linear else None,
    )


def figures(plan: balance.Plan) -> dict[str, Any]:
    """Return the figures of a plan to print: max/mean of the work, bytes, and bound over time."""
    seconds = sum(batch.seconds for batch in plan.micro_batches)
    return {
        "max/mean": round(plan.seconds / float(seconds.mean()), 3),
        "bytes": int(sum(batch.bytes.sum() for batch in plan.micro_batches)),
        "of the bound": round(plan.share, 3),
        "micro-batches": len(plan.micro_batches),
    }
