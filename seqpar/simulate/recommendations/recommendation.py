"""The result of `recommend`: ways to train a model, with predicted time and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import numpy as np

from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import table
from seqpar.simulate.recommendations.divisions import (
    LAYOUTS,
    Batches,
    Division,
    NamedLayout,
    layouts,
    planned,
)
from seqpar.simulate.steps.divided import Parallelism
from seqpar.simulate.steps.recorded_layers import nano_batches
from seqpar.simulate.steps.training_step import Step

COLUMNS = (
    *("strategy, layout", "seconds", "GB", "longest", "sent, GB", "keeping", "limit", "why not"),
)
NOT_SIMULATED = "not simulated: interrupted"
_MAX_REASON_CHARACTERS = 80  # the table cuts reasons; `why_not` has the whole text


@dataclass(frozen=True, eq=False)
class Recommendation:
    """One way to train, with predicted time and memory, or the reason why it is impossible.

    Attributes:
        strategy: the name of the strategy, for `make_attention`.
        options: further arguments of `simulate.step`. "mesh" is (rows, ranks per row), and
            "transport" is the transport of linear layers. With attention servers, "servers" is the
            number of servers, and "tasks" is the number of tasks per call.
        division: the division of devices and documents; None if all devices are context ranks, or
            if some devices are attention servers.
        layout: which context rank holds which tokens. Its documents are in the order of
            `documents`. With a `division`, this is the layout of the micro-batch with the most
            work.
        layout_name: "zigzag", "contiguous" or a method of `balance.plan`. With servers, the name is
            "whole": the ranks are trainers, and each trainer has whole documents.
        device: the type of the devices, "cuda" or "cpu".
        documents: (documents,) indices into the given lengths, in the layout's order.
        checkpointing: "none", "attention" or "full".
        offload: the fraction of activations to keep in host memory until backward, for
            `seqpar.offload`.
        seconds: the time of a step; ∞ if the way is impossible.
        excluded: True if the way was not simulated because a lower bound on its time exceeds the
            time of the best step. `seconds` is then the lower bound, and the memory is unknown.
        error: the standard deviation of the relative error of `seconds`.
        memory: the bytes of memory on the rank that needs the most memory.
        longest: the number of tokens in the longest batch that fits, if all documents grow by the
            same factor; 0 if the way was not simulated.
        bytes: the bytes that attention sends, on the rank that sends the most bytes.
        limit: the largest part of the time: "compute", "communication" or "imbalance"; "memory" if
            the step does not fit.
        why_not: the reason why this way is worse than the best one, or impossible; None for the
            best way.
        step: the simulated step.
        recurrence: the kind of linear layers; None for a model without linear layers.
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
    excluded: bool = False
    division: Division | None = field(default=None, repr=False)

    @property
    def parallelism(self) -> Parallelism:
        """The numbers of data, pipeline, tensor and context ranks, without servers."""
        if self.division is None:
            return Parallelism(context=self.layout.ranks)
        return self.division.parallelism

    @property
    def batches(self) -> Batches:
        """For each data group and micro-batch, the documents, as indices into the given lengths."""
        return ((self.documents,),) if self.division is None else self.division.batches

    @property
    def name(self) -> str:
        """The strategy, layout and division, for example "usp 4x2, zigzag, data 2, context 8"."""
        mesh, transport = self.options.get("mesh"), self.options.get("transport")
        shape = "" if mesh is None else f" {mesh[0]}x{mesh[1]}"
        if self.servers:
            shape = f" {self.layout.ranks}+{self.servers} servers"
        parts = [self.strategy + shape, self.layout_name, transport]
        if self.division is not None:
            count = self.division.micro_batches
            of_group = parts if self.parallelism.context > 1 else []
            micro_batches = f"{count} micro-batches" if count > 1 else None
            parts = [*of_group, str(self.parallelism), micro_batches]
        return ", ".join(filter(None, parts))

    @property
    def servers(self) -> int:
        """The number of devices that are attention servers."""
        return int(self.options.get("servers", 0))

    @property
    def keeping(self) -> str:
        """A short description of how activations are kept until backward; "" if unknown."""
        if self.excluded:
            return ""
        if self.offload:
            return f"offload {self.offload:.2f}"
        return "all" if self.checkpointing == "none" else f"checkpoint {self.checkpointing}"

    @property
    def code(self) -> str:
        """The lines of a program for torchrun that create the layout and the modules.

        With servers, each process is a trainer. A trainer with several documents divides them into
        two parts, called nano-batches: the servers compute attention for one nano-batch while the
        trainer computes with the other nano-batch. `layouts` has one layout per nano-batch.
        """
        if self.servers:
            lines = self._served_lines()
        elif self.division is not None:
            lines = self._divided_lines(self.division)
        else:
            lines = self._lines()
        init = ("if not dist.is_initialized():", "    dist.init_process_group()")
        program = "\n".join([*init, *lines, *self._keeping_comments()])
        standard_library = [
            f"from {module} import {name}\n"
            for module, name in (("itertools", "accumulate"), ("pathlib", "Path"))
            if f"{name}(" in program
        ]
        imports = "".join([*standard_library, "\n"] if standard_library else [])
        imports += "import torch.distributed as dist\n"
        if "init_device_mesh(" in program:
            imports += "from torch.distributed.device_mesh import init_device_mesh\n"
        return f"{imports}\nimport seqpar\n\n{program}\n"

    def _lines(self) -> list[str]:
        group = "dist.group.WORLD"
        lines: list[str] = []
        if (mesh := self.options.get("mesh")) is not None:
            lines.append(f'mesh = init_device_mesh("{self.device}", {mesh})')
            group = "mesh"
        lines.append(f'attn = seqpar.make_attention("{self.strategy}", {group})')
        lines += self._recurrent_lines("dist.group.WORLD")
        ranks, edges = self.layout.ranks, self.layout.cu_seqlens.tolist()
        if self.layout_name in LAYOUTS:
            made = f"seqpar.Layout.{self.layout_name}({edges}, {ranks})"
        else:
            lines.append(f"documents = {[*self.documents]}  # in this order")
            lines.append(f"spans = {_spans(self.layout)}")
            made = f"seqpar.Layout.from_spans(spans, {edges})"
        return [*lines, f"layout = {made}"]

    def _divided_lines(self, division: Division) -> list[str]:
        """Return the lines of a program that creates the mesh of a division. Every device runs
        these lines.
        """
        data, pipeline, tensor, context = self.parallelism
        mesh = self.options.get("mesh") or (context,)
        names = ("rows", "columns") if len(mesh) == 2 else ("context",)
        shape = pipeline, data, *mesh, tensor
        dimensions = "pipeline", "data", *names, "tensor"
        group = 'mesh["context"].get_group()' if len(mesh) == 1 else 'mesh["rows", "columns"]'
        lines = [
            f"names = {dimensions}",
            f'mesh = init_device_mesh("{self.device}", {shape}, mesh_dim_names=names)',
            f'attn = seqpar.make_attention("{self.strategy}", {group})',
            *self._recurrent_lines(group),
            f"lengths = {division.lengths.tolist()}",
        ]
        own = '[mesh.get_local_rank("data")]'
        edges = "edges = [[0, *accumulate(lengths[i] for i in batch)] for batch in batches]"
        if self.layout_name in LAYOUTS:
            batches = [[[*x] for x in micro] for micro in division.batches]
            lines += [
                "# the documents of each micro-batch",
                f"batches = {batches}{own}",
                edges,
                f"layouts = [seqpar.Layout.{self.layout_name}(x, {context}) for x in edges]",
            ]
        else:
            named = [[self._laid_out(x) for x in micro] for micro in division.batches]
            lines += [
                "# the documents of each micro-batch, in the layout's order, and each rank's spans",
                f"batches = {[[[*x.documents] for x in micro] for micro in named]}{own}",
                f"spans = {[[_spans(x.layout) for x in micro] for micro in named]}{own}",
                edges,
                "layouts = [seqpar.Layout.from_spans(*x) for x in zip(spans, edges)]",
            ]
        if tensor > 1:
            lines.append(f'# mesh["tensor"]: each rank has 1/{tensor} of the heads and matrices')
        if pipeline > 1:
            lines.append(f'# mesh["pipeline"] has {pipeline} stages, in 1F1B order')
            lines.append('# mesh["data"] and the context ranks shard Adam\'s state (ZeRO 1)')
        elif data * context > 1:
            lines.append('# mesh["data"] and the context ranks shard the parameters (FSDP)')
        return lines

    def _laid_out(self, documents: tuple[int, ...]) -> NamedLayout:
        """Return the layout of `balance.plan` for a micro-batch. If `balance.plan` fails, return
        the zigzag layout.
        """
        assert self.division is not None
        batch = self.division.lengths, self.division.divided.context, documents
        return planned(*batch) or next(layouts(*batch))

    def _recurrent_lines(self, group: str) -> list[str]:
        if self.recurrence is None:
            return []
        names = [f'"{x}"' for x in (self.recurrence, self.options.get("transport")) if x]
        return [f"recurrent = seqpar.RecurrentAttention({', '.join([group, *names])})"]

    def _served_lines(self) -> list[str]:
        batches = nano_batches(self.layout)
        lines = [
            f"# servers ({self.servers}), one device each: python -m seqpar serve --bind ADDRESS",
            'servers = Path("servers").resolve()  # a file of their addresses, one per line',
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
            "# then finish the first and continue with it until its next begin; then the second",
        ]

    def _keeping_comments(self) -> list[str]:
        if self.offload:
            return [f"# around the model: with seqpar.offload({self.offload:.2f}):"]
        if self.checkpointing == "attention":
            return ["# each block: hidden = seqpar.checkpoint(block, hidden)"]
        if self.checkpointing == "full":
            call = "torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)"
            return [f"# each block: hidden = {call}"]
        return []


class Recommendations(list[Recommendation]):
    """A list of ways to train, best first, which prints as a table.

    Attributes:
        partial: whether `recommend` was interrupted before it had simulated all ways.
    """

    def __init__(self, ways: Iterable[Recommendation] = (), partial: bool = False) -> None:
        super().__init__(ways)
        self.partial = partial

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, ways: int | None = None) -> str:
        """Return a table of the first `ways` ways to train, or by default of all ways."""
        simulated = [x for x in self if x.why_not != NOT_SIMULATED]
        rows = [COLUMNS]
        for x in simulated[:ways]:
            seconds = f"{x.seconds:.4g} ±{x.error:.0%}" if x.seconds < np.inf else ""
            seconds = f"≥ {x.seconds:.4g}" if x.excluded else seconds
            figures = (
                seconds,
                as_gb(x.memory),
                f"{x.longest:,}" if x.longest else "",
                "" if x.excluded else as_gb(x.bytes),
            )
            reason = shorten(x.why_not or "", _MAX_REASON_CHARACTERS, placeholder=" ...")
            rows.append((x.name, *figures, x.keeping, x.limit, reason))
        if not self.partial:
            return table(rows)
        counted = f"{len(simulated)} of {len(self)} ways to train were simulated"
        return f"{table(rows)}\npartial, because it was interrupted: {counted}"


def _spans(layout: Layout) -> list[list[tuple[int, int, int]]]:
    return [
        [(int(x.document), int(x.start), int(x.stop)) for x in layout.spans(rank)]
        for rank in range(layout.ranks)
    ]


def as_gb(nbytes: float) -> str:
    """Return bytes as a number of GB, or "" for NaN."""
    return "" if np.isnan(nbytes) else f"{nbytes / 1e9:.1f}"
