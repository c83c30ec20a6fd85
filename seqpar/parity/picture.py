"""Draw a comparison: which tokens differ in the output of which module.

A picture has a row for each finding about tokens, and a column for each token. In a long batch, a
column stands for several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.layout.plot import COLOURS, new_figure
from seqpar.parity.evidence import Evidence, Finding
from seqpar.parity.joining import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 1600  # in a longer batch, a column stands for several tokens
MAX_ROWS = 240  # the most findings that are drawn
_MOST = 3.0  # errors at least this many decades above the bound have the darkest colour
_AGREES, _NOT_COMPARED, _INK, _GREY = "#e4e9e4", "#ffffff", "#333333", "#777777"


def shown_findings(evidence: Evidence, rows: int) -> list[Finding]:
    """Return at most `rows` findings about tokens. The list begins two findings before the first
    one that differs by more than rounding.
    """
    with_tokens = [x for x in evidence.findings if x.errors is not None]
    real = [i for i, x in enumerate(with_tokens) if x.is_real]
    start = max(0, real[0] - 2) if real else 0
    return with_tokens[start : start + rows]


def label(x: Finding) -> str:
    return f"{x.name}, gradient" if x.stage == "gradient of output" else x.name


def column_edges(tokens: int, columns: int) -> Ints:
    """Return (min(columns, tokens) + 1,): the token at which each column of the picture begins, and
    the number of tokens.
    """
    return np.linspace(0, tokens, min(columns, tokens) + 1).astype(np.int64)


def excesses(findings: Sequence[Finding], edges: Ints) -> Floats:
    """Return (findings, columns): how far the largest error of each column exceeds the bound.

    The value is log10(error / bound), at most `_MOST`. It is −1 for a column whose tokens agree,
    and NaN for a column whose tokens were not compared.
    """
    rows = []
    for x in findings:
        assert x.errors is not None
        known = np.fmax.reduceat(x.errors, edges[:-1])
        with np.errstate(divide="ignore", invalid="ignore"):
            decades = np.where(known > x.bound, np.log10(known / x.bound), -1.0)
        rows.append(np.where(np.isnan(known), np.nan, np.minimum(decades, _MOST)))
    return np.array(rows)


def draw(evidence: Evidence, text: str, path: Path) -> None:
    """Draw the picture into the file `path`, with `text` above the picture.

    A dot marks the first token that differs in each row, and a circle marks the first difference.
    """
    findings = shown_findings(evidence, MAX_ROWS)
    if not findings:
        raise ValueError(
            "a picture shows outputs of tokens, and these recordings have none in common"
        )
    tokens = evidence.a.tokens
    edges = column_edges(tokens, MAX_COLUMNS)
    figure = new_figure(11, 2 + 0.17 * max(4, len(findings)))
    height = max(4, len(findings))
    ranks, modules = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [1, height], "hspace": 0.02}
    )
    _draw_ranks(ranks, evidence, edges)
    _draw_modules(modules, evidence, findings, edges)
    figure.suptitle(text, fontsize=9, color=_INK, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _draw_ranks(axes: Axes, evidence: Evidence, edges: Ints) -> None:
    from matplotlib.colors import to_rgb

    rank_of = evidence.b.rank_of.ravel()[edges[:-1]]
    colours = [to_rgb(COLOURS[x % len(COLOURS)] if x >= 0 else _NOT_COMPARED) for x in rank_of]
    box = (0, evidence.a.tokens, 0.5, -0.5)
    axes.imshow(np.array([colours]), aspect="auto", interpolation="nearest", extent=box)
    axes.set_yticks([0], [f"rank of {evidence.b.name}"], fontsize=7)
    starts = np.flatnonzero(np.diff(rank_of, prepend=-2))
    for at in starts if starts.size <= 32 else ():
        name = str(rank_of[at]) if rank_of[at] >= 0 else ""
        axes.text(edges[at], 0, f" {name}", va="center", fontsize=7, color="white")
    axes.tick_params(axis="x", bottom=False, labelbottom=False)


def _draw_modules(axes: Axes, evidence: Evidence, findings: list[Finding], edges: Ints) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba

    values = excesses(findings, edges)
    picture = colormaps["YlOrRd"](0.35 + 0.65 * np.clip(values, 0, _MOST) / _MOST)
    picture[values < 0] = to_rgba(_AGREES)
    picture[np.isnan(values)] = to_rgba(_NOT_COMPARED)
    rows, tokens = evidence.shape
    box = (0, rows * tokens, len(findings) - 0.5, -0.5)
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=box)
    for row in range(1, rows if rows <= 64 else 1):
        axes.axvline(row * tokens, color=_INK, linewidth=0.8)
    first = next((i for i, x in enumerate(findings) if x.is_real), None)
    for i, x in enumerate(findings):
        if (token := x.first_token) is not None:
            size, fill = (49, "none") if i == first else (9, _INK)
            axes.scatter(token + 0.5, i, s=size, facecolors=fill, edgecolors=_INK, zorder=3)
    axes.set_yticks(range(len(findings)), [label(x) for x in findings], fontsize=6)
    axes.set_ylim(len(findings) - 0.5, -0.5)
    what = "token" if rows == 1 else f"token; a line separates the {rows} rows"
    legend = "grey: agrees; yellow to red: 1 to 1,000 times the bound; dot: first difference"
    axes.set_xlabel(f"{what} ({legend})", fontsize=8, color=_GREY)
