"""Draw a plan: ranks × time, one colour per document. Requires matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seqpar.balance.planning.micro_batch import MicroBatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RANKS_DRAWN, MAX_COLOURS = 64, 19  # at most; further documents are grey
_INK, _GREY, _LOCAL = "#222222", "#777777", "#d9d9d9"


def plot_steps(
    batches: Sequence[MicroBatch], ranks: int, bound: float, title: str, path: Path
) -> None:
    """Draw each rank's seconds per micro-batch into `path`, with the bound as a dotted line.

    A rank's time is divided between its documents by their pairs and tokens. The longest have
    colours, the others are grey. At most `MAX_RANKS_DRAWN` ranks are drawn.
    """
    from matplotlib.figure import Figure

    drawn = np.unique(np.linspace(0, ranks - 1, min(ranks, MAX_RANKS_DRAWN)).astype(int)).tolist()
    figure = Figure(figsize=(9, 1.6 + 0.16 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    begin = 0.0
    for batch in batches:
        _draw(axes, batch, drawn, begin)
        begin += float(batch.seconds.max())
        axes.axvline(begin, color=_INK, linewidth=1)
    axes.axvline(bound, color=_INK, linewidth=1, linestyle=":")
    axes.set_title(title, fontsize=9, color=_INK, loc="left")
    axes.set_yticks(range(len(drawn)), [str(rank) for rank in drawn], fontsize=6)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_ylabel("rank", color=_INK)
    axes.set_xlabel("seconds; dotted: the bound", color=_GREY)
    figure.savefig(path, dpi=150)


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
