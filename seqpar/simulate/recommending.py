"""Recommend: simulate what could train a model on a cluster, and rank it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from seqpar.arguments import CuSeqlens, as_lengths, shown
from seqpar.costs.cluster import Cluster
from seqpar.costs.memory import CHECKPOINTING
from seqpar.costs.model import Model
from seqpar.layout.layout import Layout
from seqpar.simulate.steps import Step, step

# Strategies, in the order in which equals are ranked: the simplest first.
_STRATEGIES = ("ulysses", "ring", "all_gather", "token_ring", "disaggregated", "usp")
_LAYOUTS = ("zigzag", "contiguous")
_COLUMNS = ("strategy, layout", "seconds", "GB", "sent, GB", "checkpointing", "limit", "why not")


@dataclass(frozen=True, eq=False)
class Recommendation:
    """A way to train, with what it is predicted to take; or why it cannot be.

    Attributes:
        strategy: its name, for `make_attention`.
        options: {"mesh": (rows, ranks of a row)} of "usp"; else empty.
        layout: which rank holds what.
        layout_name: how it is made: "zigzag" or "contiguous".
        device: the type of the devices, "cuda" or "cpu".
        checkpointing: "none", "attention" or "full": the first that fits.
        seconds: of a step; ∞ if it cannot be.
        memory: the bytes of the rank that needs most.
        bytes: what attention sends, of the rank that sends most.
        limit: what takes most time beside even work: "compute", "communication" or "imbalance".
        why_not: why another one is better, or why this one cannot be; None of the first.
        step: what was simulated.
    """

    strategy: str
    options: dict[str, Any]
    layout: Layout = field(repr=False)
    layout_name: str
    device: str
    checkpointing: str = "none"
    seconds: float = np.inf
    memory: float = np.nan
    bytes: int = 0
    limit: str = ""
    why_not: str | None = None
    step: Step | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Strategy and layout in short, as in "usp 4x2, zigzag"."""
        mesh = self.options.get("mesh")
        return (
            f"{self.strategy}{'' if mesh is None else f' {mesh[0]}x{mesh[1]}'}, {self.layout_name}"
        )

    @property
    def code(self) -> str:
        """The lines that make the layout and the module, to paste into a program."""
        group = "group"
        lines = ["import seqpar", ""]
        if (mesh := self.options.get("mesh")) is not None:
            group = "mesh"
            lines = ["from torch.distributed.device_mesh import init_device_mesh", "", *lines]
            lines.append(f'mesh = init_device_mesh("{self.device}", {mesh})')
        ranks = self.layout.ranks
        lines += [
            f"layout = seqpar.Layout.{self.layout_name}(cu_seqlens, {ranks})",
            f'attn = seqpar.make_attention("{self.strategy}", {group})',
        ]
        if self.checkpointing == "attention":
            lines.append("hidden = seqpar.checkpoint(block, hidden)  # each block")
        if self.checkpointing == "full":
            lines += [
                "from torch.utils.checkpoint import checkpoint",
                "hidden = checkpoint(block, hidden, use_reentrant=False)  # each block",
            ]
        return "\n".join(lines) + "\n"


class Recommendations(list[Recommendation]):
    """A ranked list, whose text is a table."""

    def __str__(self) -> str:
        rows = [_COLUMNS]
        for x in self:
            fits = x.seconds < np.inf
            figures = (f"{x.seconds:.4g}" if fits else "", _gb(x.memory), _gb(x.bytes))
            rows.append((x.name, *figures, x.checkpointing, x.limit, x.why_not or ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def recommend(model: Model, cluster: Cluster, lengths: CuSeqlens) -> Recommendations:
    """Return ways to train a model on documents, the fastest first, each with why it is not better.

    Each strategy that the model's heads allow is simulated (`seqpar.simulate.step`) with each
    layout, all documents in one packed batch over all ranks, with the least checkpointing that fits
    into a device's memory. Those that fit with none come last, and say by how much they do not.

    Args:
        model: `seqpar.balance.Model`.
        cluster: `seqpar.balance.Cluster`: how many ranks there are, and what they can do.
        lengths: (documents,) tokens of each.

    Raises:
        ValueError: if there are no tokens.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model must be a Model, got {shown(model)}")
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {shown(cluster)}")
    lengths = as_lengths("lengths", lengths)
    if not lengths.sum():
        raise ValueError("lengths must have a token")
    ranks, edges = cluster.ranks, np.r_[0, np.cumsum(lengths)]
    device = "cuda" if cluster.overlaps else "cpu"
    found = []
    for name in _LAYOUTS:
        layout = getattr(Layout, name)(edges, ranks)
        for strategy in _STRATEGIES:
            for options in _options(strategy, cluster):
                candidate = Recommendation(strategy, options, layout, name, device)
                found.append(_simulated(candidate, model, cluster))
    found.sort(key=lambda x: x.seconds)  # what is as fast stays in order
    best = found[0]
    return Recommendations([best, *(_compared(x, best) for x in found[1:])])


def _options(strategy: str, cluster: Cluster) -> list[dict[str, Any]]:
    """Return a strategy's options: meshes whose rows lie within a node."""
    if strategy != "usp":
        return [{}]
    size, ranks = cluster.devices_per_node, cluster.ranks
    return [{"mesh": (ranks // n, n)} for n in range(2, size + 1) if size % n == 0 and n < ranks]


def _simulated(candidate: Recommendation, model: Model, cluster: Cluster) -> Recommendation:
    """Return a candidate with what it takes, with the least checkpointing that fits."""
    short = 0.0
    for checkpointing in CHECKPOINTING:
        try:
            found = step(
                candidate.strategy,
                candidate.layout,
                cluster,
                model,
                checkpointing=checkpointing,
                **candidate.options,
            )
        except ValueError as refusal:
            return replace(candidate, checkpointing="", why_not=str(refusal))
        memory = float(found.memory.max())
        candidate = replace(
            candidate, checkpointing=checkpointing, memory=memory, bytes=int(found.bytes.max())
        )
        short = memory - cluster.device.memory
        if short <= 0:
            return replace(candidate, seconds=found.seconds, limit=_limit(found), step=found)
    needs = f"needs {_gb(memory)} GB of {_gb(cluster.device.memory)}"
    return replace(candidate, limit="memory", why_not=f"{needs}: {_gb(short)} GB too much")


def _limit(found: Step) -> str:
    """Return what takes most of the time."""
    busy = found.spent("busy")
    layers = found.seconds - found.head
    parts = {
        "compute": float(busy.mean()),
        "imbalance": float(busy.max() - busy.mean()),
        "communication": layers - float(busy.max()),
    }
    return max(parts, key=lambda name: parts[name])


def _compared(x: Recommendation, best: Recommendation) -> Recommendation:
    """Return a recommendation that says why it is not the best."""
    if x.step is None or best.step is None:
        return x
    slower = f"{x.seconds / best.seconds - 1:.1%} slower"
    if x.checkpointing != best.checkpointing:
        return replace(x, why_not=f"{slower}: it needs checkpointing {x.checkpointing!r}")
    waiting, busy = (
        float(x.step.spent(kind).max() - best.step.spent(kind).max())
        for kind in ("waiting", "busy")
    )
    reason = "messages are less hidden" if waiting > busy else "its busiest rank computes longer"
    return replace(x, why_not=f"{slower}: {reason}")


def _gb(nbytes: float) -> str:
    return "" if np.isnan(nbytes) else f"{nbytes / 1e9:.1f}"
