"""Recommendation: a way to train, and what it is predicted to take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import table
from seqpar.simulate.steps import Step

COLUMNS = (
    *("strategy, layout", "seconds", "GB", "longest", "sent, GB", "keeping", "limit", "why not"),
)


@dataclass(frozen=True, eq=False)
class Recommendation:
    """A way to train, with what it is predicted to take; or why it cannot be.

    Attributes:
        strategy: its name, for `make_attention`.
        options: {"mesh": (rows, ranks of a row)} of "mesh" and "usp"; else empty.
        layout: which rank holds what; its documents are in the order of `documents`.
        layout_name: how it is made: "zigzag", "contiguous" or a method of `balance.plan`.
        device: the type of the devices, "cuda" or "cpu".
        documents: (documents,) indices into the lengths, in the layout's order.
        checkpointing: "none", "attention" or "full".
        offload: the share of activations that wait in host memory, for `seqpar.offload`.
        seconds: of a step; ∞ if it cannot be.
        error: of the seconds, one standard deviation, as a fraction (`error_of` says of what).
        memory: the bytes of the rank that needs most.
        longest: tokens of the longest batch that fits, of documents in the same proportions.
        bytes: what attention sends, of the rank that sends most.
        limit: what takes most time beside even work: "compute", "communication", "imbalance", or
            "memory" if it does not fit.
        why_not: why another one is better, or why this one cannot be; None of the first.
        step: what was simulated.
    """

    strategy: str
    options: dict[str, Any]
    layout: Layout = field(repr=False)
    layout_name: str
    device: str
    documents: tuple[int, ...] = field(repr=False, default=())
    checkpointing: str = "none"
    offload: float = 0.0
    seconds: float = np.inf
    error: float = np.nan
    memory: float = np.nan
    longest: int = 0
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
    def keeping(self) -> str:
        """How activations are kept for backward, in short."""
        if self.offload:
            return f"offload {self.offload:.2f}"
        return "all" if self.checkpointing == "none" else f"checkpoint {self.checkpointing}"

    @property
    def code(self) -> str:
        """A program's lines that make the layout and the module, as they run under torchrun."""
        imports = ["import torch.distributed as dist", "", "import seqpar"]
        group, lines = "dist.group.WORLD", []
        if (mesh := self.options.get("mesh")) is not None:
            imports.insert(1, "from torch.distributed.device_mesh import init_device_mesh")
            lines.append(f'mesh = init_device_mesh("{self.device}", {mesh})')
            group = "mesh"
        lines.append(f'attn = seqpar.make_attention("{self.strategy}", {group})')
        ranks, edges = self.layout.ranks, self.layout.cu_seqlens
        if self.layout_name in ("zigzag", "contiguous"):
            made = f"seqpar.Layout.{self.layout_name}({[*map(int, edges)]}, {ranks})"
        else:
            lines.append(f"documents = {[*self.documents]}  # in this order")
            spans = [
                [(int(x.document), int(x.start), int(x.stop)) for x in self.layout.spans(rank)]
                for rank in range(ranks)
            ]
            lines.append(f"spans = {spans}")
            made = f"seqpar.Layout.from_spans(spans, {[*map(int, edges)]})"
        lines.append(f"layout = {made}")
        return "\n".join([*imports, "", *_INIT, *lines, *self._keeping_lines()]) + "\n"

    def _keeping_lines(self) -> list[str]:
        """Return how the model keeps its activations, as comments: they need the model."""
        if self.offload:
            return [f"# around the model: with seqpar.offload({self.offload:.2f}):"]
        if self.checkpointing == "attention":
            return ["# each block: hidden = seqpar.checkpoint(block, hidden)"]
        if self.checkpointing == "full":
            again = "torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)"
            return [f"# each block: hidden = {again}"]
        return []


_INIT = ("if not dist.is_initialized():", "    dist.init_process_group()")


class Recommendations(list[Recommendation]):
    """A ranked list, whose text is a table."""

    def __str__(self) -> str:
        rows = [COLUMNS]
        for x in self:
            seconds = f"{x.seconds:.4g} ±{x.error:.0%}" if x.seconds < np.inf else ""
            figures = (
                seconds,
                as_gb(x.memory),
                f"{x.longest:,}" if x.longest else "",
                as_gb(x.bytes),
            )
            rows.append((x.name, *figures, x.keeping, x.limit, x.why_not or ""))
        return table(rows)


def as_gb(nbytes: float) -> str:
    """Return bytes as GB, or nothing for NaN."""
    return "" if np.isnan(nbytes) else f"{nbytes / 1e9:.1f}"
