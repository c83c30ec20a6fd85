"""Recommendation: a way to train, and what it is predicted to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import numpy as np

from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import table
from seqpar.simulate.steps.served_layers import nano_batches
from seqpar.simulate.steps.steps import Step

COLUMNS = (
    *("strategy, layout", "seconds", "GB", "longest", "sent, GB", "keeping", "limit", "why not"),
)
_MAX_REASON_CHARACTERS = 80  # in the table; `why_not` has the whole reason


@dataclass(frozen=True, eq=False)
class Recommendation:
    """A way to train, with what it is predicted to take; or why it cannot be.

    Attributes:
        strategy: its name, for `make_attention`.
        options: {"mesh": (rows, ranks of a row)} of "mesh" and "usp"; {"transport": name} of linear
            layers; {"servers": how many, "tasks": of a call} with attention servers; else empty.
            All of them are arguments of `simulate.step`.
        layout: which rank holds what; its documents are in the order of `documents`.
        layout_name: how it is made: "zigzag", "contiguous", a method of `balance.plan`, or, with
            servers, "whole": its ranks are trainers, of whole documents.
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
        recurrence: the kind of linear layers; None if there are none.
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
    recurrence: str | None = None

    @property
    def name(self) -> str:
        """Strategy and layout in short, as in "usp 4x2, zigzag"."""
        mesh, transport = self.options.get("mesh"), self.options.get("transport")
        shape = "" if mesh is None else f" {mesh[0]}x{mesh[1]}"
        if self.servers:
            shape = f" {self.layout.ranks}+{self.servers} servers"
        return ", ".join([self.strategy + shape, self.layout_name, *filter(None, [transport])])

    @property
    def servers(self) -> int:
        """How many devices are attention servers."""
        return int(self.options.get("servers", 0))

    @property
    def keeping(self) -> str:
        """How activations are kept for backward, in short."""
        if self.offload:
            return f"offload {self.offload:.2f}"
        return "all" if self.checkpointing == "none" else f"checkpoint {self.checkpointing}"

    @property
    def code(self) -> str:
        """A program's lines that make the layout and the modules, as they run under torchrun.

        With servers each process is a trainer, whose documents are in `layouts`: one or, to take
        turns, two.
        """
        if self.servers:
            first = "from itertools import accumulate", "from pathlib import Path", ""
            return self._text(self._served_lines(), first)
        imports, group, lines = list[str](), "dist.group.WORLD", list[str]()
        if (mesh := self.options.get("mesh")) is not None:
            imports.append("from torch.distributed.device_mesh import init_device_mesh")
            lines.append(f'mesh = init_device_mesh("{self.device}", {mesh})')
            group = "mesh"
        lines.append(f'attn = seqpar.make_attention("{self.strategy}", {group})')
        lines += self._recurrent_lines("dist.group.WORLD")
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
        return self._text(lines, imports=imports)

    def _text(
        self, lines: list[str], first: Sequence[str] = (), imports: Sequence[str] = ()
    ) -> str:
        """Return lines behind imports, those of the standard library first."""
        seqpars = ["import torch.distributed as dist", *imports, "", "import seqpar", ""]
        return "\n".join([*first, *seqpars, *_INIT, *lines, *self._keeping_lines()]) + "\n"

    def _recurrent_lines(self, group: str) -> list[str]:
        """Return what makes the module of linear layers, if there are any."""
        if self.recurrence is None:
            return []
        given = [f'"{x}"' for x in (self.recurrence, self.options.get("transport")) if x]
        return [f"recurrent = seqpar.RecurrentAttention({', '.join([group, *given])})"]

    def _served_lines(self) -> list[str]:
        """Return what makes a trainer's module and layouts."""
        batches = nano_batches(self.layout)
        lines = [
            f"# servers ({self.servers}), a device each: python -m seqpar serve --bind ADDRESS",
            'servers = Path("servers").resolve()  # a file of their addresses, a line each',
            "pool = seqpar.ServerPool.connect(servers.as_uri(), home_depth=0)",
            f"attn = seqpar.DisaggregatedAttention(pool, tasks={self.options['tasks']})",
        ]
        if self.recurrence is not None:
            lines += ["alone, _ = dist.new_subgroups(1)", *self._recurrent_lines("alone")]
        return [
            *lines,
            f"lengths = {np.diff(self.layout.cu_seqlens).tolist()}",
            f"documents = {batches}[dist.get_rank()]",
            "edges = [[0, *accumulate(lengths[i] for i in batch)] for batch in documents]",
            "layouts = [seqpar.Layout.contiguous(x, 1) for x in edges]",
            "# a layer: begun = [attn.begin(*qkv, x, causal=True) for qkv, x in zip(own, layouts)]",
            "# then finish the first, go on with it until its next begin, and likewise the second",
        ]

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
            reason = shorten(x.why_not or "", _MAX_REASON_CHARACTERS, placeholder=" ...")
            rows.append((x.name, *figures, x.keeping, x.limit, reason))
        return table(rows)


def as_gb(nbytes: float) -> str:
    """Return bytes as GB, or nothing for NaN."""
    return "" if np.isnan(nbytes) else f"{nbytes / 1e9:.1f}"
