"""The plan of a step: its micro-batches, the ranks that compute them, and the predicted seconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seqpar.balance.planning.micro_batch import MicroBatch
from seqpar.core.arguments import as_bool, as_float, as_int, as_path, as_ranks, shown
from seqpar.layout.handle import encode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT, VERSION = "seqpar.plan", 2
MAX_RANKS_DRAWN = 64
MAX_COLOURS = 19  # the longest documents have colours, and all others are grey
_INK, _GREY, _LOCAL = "#222222", "#777777", "#d9d9d9"


@dataclass(frozen=True, eq=False)
class Plan:
    """The micro-batches of a step. Together they contain every document once.

    Attributes:
        micro_batches: the documents that are computed together, and their placement.
        method: the method by which documents were placed.
        ranks: number of ranks.
        capacity: the largest number of tokens that a rank can hold.
        bound: a lower bound on the predicted seconds of any plan. It is the largest of three times:
            the mean time of the ranks if nothing were sent, the time in which all ranks together
            compute the longest document, and the time of a rank with a single token.
        dropped: number of empty documents that were left out.
        remap: whether linear modules run on separate layouts, those of `token_balanced`.
        heads: the number of ranks of a node that divide the heads of attention, which is the length
            of a row of `USPAttention`'s mesh.
    """

    micro_batches: tuple[MicroBatch, ...]
    method: str
    ranks: int
    capacity: int
    bound: float
    dropped: int = 0
    remap: bool = False
    heads: int = 1

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step: each micro-batch takes as long as its slowest rank."""
        return float(sum(batch.seconds.max(initial=0.0) for batch in self.micro_batches))

    @property
    def share(self) -> float:
        """The bound divided by `seconds`; 1 is the best possible."""
        return self.bound / self.seconds if self.seconds else 1.0

    @cached_property
    def digest(self) -> str:
        """A hash of the plan's spans: ranks with the same digest hold the same spans."""
        named = FORMAT, VERSION, self.ranks, self.capacity, self.remap, self.heads
        found = hashlib.sha256(" ".join(map(str, named)).encode())
        for batch in self.micro_batches:
            for numbers in (batch.documents, batch.lengths, encode(batch.cut)):
                found.update(np.r_[numbers.size, numbers].astype("<i8").tobytes())
        return found.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the plan as JSON. If `path` is given, also write the JSON to this file."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        batches = [batch.as_dict() for batch in self.micro_batches]
        values = {"format": FORMAT, "version": VERSION, **fields, "digest": self.digest}
        text = json.dumps(values | {"micro_batches": batches}) + "\n"
        if path is not None:
            as_path("path", path).write_text(text)
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan from which `to_json` made this text.

        Raises a ValueError if the text has a different version, or if a field is missing or wrong.
        The error names the field.
        """
        try:
            values = json.loads(text)
        except (TypeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"text must be a plan's JSON: {error}") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"text must be a plan that to_json wrote, with format {FORMAT!r}")
        if values.get("version") != VERSION:
            found = shown(values.get("version"))
            raise ValueError(f"text: version must be {VERSION}, got {found}")
        try:
            if not isinstance(values["micro_batches"], list):
                raise ValueError(
                    f"micro_batches must be a list, got {shown(values['micro_batches'])}"
                )
            batches = tuple(MicroBatch.from_dict(x) for x in values["micro_batches"])
            fields = {name: read(name, values[name]) for name, read in _FIELDS.items()}
            plan = cls(batches, **fields)
            same = plan.digest == values["digest"]
            for batch in batches:
                batch.check(plan.ranks)
        except KeyError as error:
            raise ValueError(f"text must have the field {error}, as to_json writes it") from None
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise ValueError(f"text: {error}") from None
        if not same:
            raise ValueError(
                "text: digest must be that of the micro-batches: the text was changed or damaged "
                "after to_json wrote it, so make the plan again"
            )
        return plan

    def plot(self, path: str | Path) -> None:
        """Draw the time of each rank into a file, with one colour per document. Requires
        matplotlib.

        A rank's time is divided among its documents according to their (query, key) pairs and
        tokens. The `MAX_COLOURS` longest documents have colours, and all shorter documents are
        grey. At most `MAX_RANKS_DRAWN` ranks are drawn. A dotted line shows `bound`, the lower
        bound on the seconds of any plan.
        """
        path = as_path("path", path)
        from matplotlib.figure import Figure

        count = min(self.ranks, MAX_RANKS_DRAWN)
        drawn = np.unique(np.linspace(0, self.ranks - 1, count).astype(int)).tolist()
        figure = Figure(figsize=(9, 1.6 + 0.16 * len(drawn)), layout="constrained")
        axes = figure.subplots()
        begin = 0.0
        for batch in self.micro_batches:
            _draw(axes, batch, drawn, begin)
            begin += float(batch.seconds.max())
            axes.axvline(begin, color=_INK, linewidth=1)
        axes.axvline(self.bound, color=_INK, linewidth=1, linestyle=":")
        axes.set_title(str(self).split("\n", 1)[0], fontsize=9, color=_INK, loc="left")
        axes.set_yticks(range(len(drawn)), [str(rank) for rank in drawn], fontsize=6)
        axes.set_ylim(len(drawn) - 0.5, -0.5)
        axes.set_ylabel("rank", color=_INK)
        axes.set_xlabel("seconds; dotted: the bound", color=_GREY)
        figure.savefig(path, dpi=150)

    def __str__(self) -> str:
        head = f"{self.method}: {self.seconds:.4g} s, {self.share:.1%} of the bound "
        head += f"{self.bound:.4g} s; {self.ranks} ranks of {self.capacity:,} tokens"
        if self.dropped:
            head += f"; {self.dropped} empty documents dropped"
        if self.heads > 1:
            head += f"; heads shared by {self.heads}"
        if self.remap:
            head += "; linear modules on even tokens"
        most = max((float(batch.offload.max()) for batch in self.micro_batches), default=0.0)
        if most:
            head += f"; a rank offloads up to {most:.0%}"
        rows = [
            "micro-batch | documents | tokens, most | seconds, most | max/mean | GB sent, most",
            "-----------:|----------:|-------------:|--------------:|---------:|--------------:",
        ]
        for i, batch in enumerate(self.micro_batches):
            slowest, mean = batch.seconds.max(), max(batch.seconds.mean(), 1e-30)
            rows.append(
                f"{i:11} | {batch.documents.size:9,} | {batch.tokens.max():12,} | "
                f"{slowest:13.4g} | {slowest / mean:8.3f} | {batch.bytes.max() / 1e9:13.3f}"
            )
        return "\n".join([head, *rows])


def _draw(axes: Axes, batch: MicroBatch, ranks: Sequence[int], begin: float) -> None:
    """Draw a micro-batch. On each rank the longest documents come first."""
    from matplotlib import colormaps

    longest = np.argsort(-batch.lengths, kind="stable")[:MAX_COLOURS]
    colour = {int(d): colormaps["tab20"](i) for i, d in enumerate(longest)}
    cu = np.r_[0, np.cumsum(batch.lengths)]
    for row, rank in enumerate(ranks):
        documents, starts, stops = batch.cut.columns(cu, rank)
        work = (stops - starts) * (1.0 + (starts + stops) / 2)
        left, scale = begin, float(batch.seconds[rank]) / max(float(work.sum()), 1.0)
        named = np.isin(documents, longest)
        found, index = np.unique(documents[named], return_inverse=True)
        widths = np.bincount(index, work[named], found.size) * scale
        order = np.argsort(-batch.lengths[found], kind="stable")
        for i in order.tolist():
            axes.barh(row, widths[i], left=left, height=0.8, color=colour[int(found[i])])
            left += float(widths[i])
        rest = float(work[~named].sum()) * scale
        axes.barh(row, rest, left=left, height=0.8, color=_LOCAL)


def _as_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shown(value)}")
    return value


_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "method": _as_text, "ranks": as_ranks, "capacity": as_int, "bound": as_float,
    "dropped": as_int, "remap": as_bool, "heads": as_int,
}  # fmt: skip
