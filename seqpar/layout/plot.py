"""Pictures of layouts and masks: which rank holds each token, and which keys each query attends
to.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import as_path, shown
from seqpar.core.compiling import outside_graphs
from seqpar.layout.geometry import Geometry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["causal_work", "plot_layouts", "plot_masks"]

# in the picture of a layout; in longer batches, a column stands for several tokens
MAX_COLUMNS = 1600
MAX_MASK_TOKENS = 2000  # in the picture of a mask, which has one row and one column per token
# The palette "bright" by Paul Tol, which is suitable for colour-blind people.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_INK, _GREY, _LANE = "#333333", "#777777", "#f1f1f1"


class DrawnLayout(Protocol):
    """The attributes of `seqpar.Layout` that are drawn. This protocol is needed because layout.py
    imports this file, so this file cannot import `Layout`.
    """

    @property
    def geometry(self) -> Geometry: ...


class DrawnMask(Protocol):
    def visible(self, geometry: Geometry) -> NDArray[np.bool_]: ...


# Separate functions compute what the pictures show, so that tests can compare numbers.
def held_fractions(layout: DrawnLayout, columns: int = MAX_COLUMNS) -> NDArray[np.float64]:
    """Return the fraction of the tokens in each column of a picture that each rank holds.

    The result is (ranks, columns). A column stands for consecutive tokens. A batch of at most
    `columns` tokens has one column per token, so all fractions are 0 or 1.
    """
    geometry = layout.geometry
    columns = min(columns, geometry.tokens)
    column = np.arange(geometry.tokens) * columns // max(geometry.tokens, 1)
    held = [column[geometry.token_indices(rank)] for rank in range(geometry.ranks)]
    counts = [np.bincount(columns_of_rank, minlength=columns) for columns_of_rank in held]
    return np.array(counts) / np.maximum(np.bincount(column, minlength=columns), 1)


@outside_graphs
def causal_work(layout: DrawnLayout) -> NDArray[np.int64]:
    """Return the number of (query, key) pairs of each rank under a causal mask, (ranks,)."""
    _check_layout(layout)
    return np.array([(x.positions + 1).sum(dtype=np.int64) for x in layout.geometry.holdings])


def computing_ranks(mask: DrawnMask, layout: DrawnLayout) -> NDArray[np.int64]:
    """Return the rank that holds the query (row) of each visible pair, and −1 for each hidden pair,
    (T, T).
    """
    geometry = layout.geometry
    owner = np.empty(geometry.tokens, dtype=np.int64)
    for rank in range(geometry.ranks):
        owner[geometry.token_indices(rank)] = rank
    return np.where(mask.visible(geometry), owner[:, None], -1)


@outside_graphs
def plot_layouts(layouts: Mapping[str, DrawnLayout], path: str | Path) -> None:
    """Draw layouts of one packed batch below each other, with their names, into the file `path`.

    A layout is drawn as one strip per rank, in which the rank's tokens are coloured. Lines separate
    the documents. The bars on the right show each rank's fraction of the work under a causal mask.
    The number next to the bars is the work of the busiest rank divided by the mean work.
    """
    _check_names("layouts", layouts)
    path = _checked(path, *layouts.values())
    heights = [min(0.27 * layout.geometry.ranks, 5.0) for layout in layouts.values()]
    figure = new_figure(9.0, sum(heights) + 0.15 * len(heights) + 0.75)
    grid = figure.add_gridspec(len(layouts), 2, width_ratios=[6, 1], height_ratios=heights)
    for row, (name, layout) in enumerate(layouts.items()):
        lanes, bars = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        _draw_lanes(lanes, layout, name)
        _draw_work(bars, layout)
        if row == 0:
            _name_documents(lanes, layout)
            bars.set_title("causal work", fontsize=10, color=_GREY)
        if row < len(layouts) - 1:
            lanes.set_xticks([])
    lanes.set_xlabel("token of the packed batch", color=_GREY)
    bars.set_xlabel("(busiest / mean)", color=_GREY, fontsize=9)
    figure.savefig(path, dpi=180)


@outside_graphs
def plot_masks(masks: Mapping[str, DrawnMask], layout: DrawnLayout, path: str | Path) -> None:
    """Draw masks over one layout side by side, with their names, into the file `path`.

    A row is a query and a column is a key. A visible pair has the colour of the rank that holds the
    query. If the layout has more than 2,000 tokens, this raises a ValueError that names `layout`.
    """
    _check_names("masks", masks)
    path = _checked(path, layout)
    if (tokens := layout.geometry.tokens) > MAX_MASK_TOKENS:
        most = MAX_MASK_TOKENS
        raise ValueError(f"layout must have at most {most} tokens to draw a mask, got {tokens}")
    figure = new_figure(2.4 * len(masks) + 0.4, 3.3)
    for column, (name, mask) in enumerate(masks.items()):
        axes = figure.add_subplot(1, len(masks), column + 1)
        _draw_mask(axes, mask, layout, name)
        axes.set_xlabel("key", color=_GREY)
        if column == 0:
            axes.set_ylabel("query", color=_GREY)
    _draw_ranks(figure, layout)
    figure.savefig(path, dpi=180)


def _checked(path: str | Path, *layouts: DrawnLayout) -> Path:
    for layout in layouts:
        _check_layout(layout)
    return as_path("path", path)


def _check_layout(layout: DrawnLayout) -> None:
    if not hasattr(layout, "geometry"):
        raise TypeError(f"layout must be a seqpar.Layout, got {type(layout).__name__}")


def _check_names(name: str, values: Mapping[str, object]) -> None:
    if not isinstance(values, Mapping) or not values:
        expected = "a mapping from names to what is drawn, with one at least"
        raise TypeError(f"{name} must be {expected}, got {shown(values)}")


def new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        how = "pip install matplotlib, or install the extra seqpar[bench]"
        raise ImportError(f"plotting needs matplotlib: {how}") from error
    spacing = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    return Figure(figsize=(width, height), layout=spacing, facecolor="white")


def _colours(layout: DrawnLayout) -> list[str]:
    return [COLOURS[rank % len(COLOURS)] for rank in range(layout.geometry.ranks)]


def _draw_lanes(axes: Axes, layout: DrawnLayout, name: str) -> None:
    from matplotlib.colors import to_rgb, to_rgba_array

    geometry = layout.geometry
    tokens, ranks = geometry.tokens, geometry.ranks
    if tokens:
        lane = np.array(to_rgb(_LANE))
        colours = to_rgba_array(_colours(layout))[:, None, :3]
        picture = lane + held_fractions(layout)[..., None] * (colours - lane)
        box = (0, tokens, ranks - 0.5, -0.5)
        axes.imshow(picture, aspect="auto", interpolation="nearest", extent=box)
    for edge in range(ranks - 1) if ranks <= 32 else ():
        axes.axhline(edge + 0.5, color="white", linewidth=2)
    for border in geometry.cu_seqlens[1:-1] if geometry.lengths.size <= 200 else ():
        axes.axvline(border, color=_INK, linewidth=1.2)
    _remove_frame(axes)
    named = range(0, ranks, -(-ranks // 16))
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(name, fontsize=12, fontweight="bold", color=_INK, labelpad=8)


def _name_documents(axes: Axes, layout: DrawnLayout) -> None:
    geometry = layout.geometry
    borders = geometry.cu_seqlens if geometry.lengths.size <= 12 else ()
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    for document, (start, stop) in enumerate(pairwise(borders)):
        if stop - start > geometry.tokens / 12:
            name, middle = f"document {document}", ((start + stop) / 2, 1.0)
            axes.annotate(name, middle, (0, 5), ha="center", color=_GREY, **place)


def _draw_work(axes: Axes, layout: DrawnLayout) -> None:
    work = causal_work(layout)
    share = work / max(work.mean(), 1)
    axes.barh(range(share.size), share, height=0.8, color=_colours(layout))
    axes.axvline(1, color=_INK, linewidth=1, linestyle=":")
    axes.set(xlim=(0, 1.05 * max(2.0, share.max())), ylim=(share.size - 0.5, -0.5))
    axes.set(xticks=[], yticks=[])
    _remove_frame(axes)
    busiest = f"{share.max():.2f}"
    axes.text(1, 0.5, busiest, transform=axes.transAxes, va="center", color=_INK, fontsize=12)


def _draw_mask(axes: Axes, mask: DrawnMask, layout: DrawnLayout, name: str) -> None:
    from matplotlib.colors import to_rgba_array

    colours = to_rgba_array([*_colours(layout), _LANE])  # the last colour is for rank −1
    edge = max(layout.geometry.tokens, 1)
    picture = colours[computing_ranks(mask, layout)]
    axes.imshow(picture, interpolation="nearest", extent=(0, edge, edge, 0))
    for border in layout.geometry.cu_seqlens[1:-1]:
        axes.axvline(border, color=_INK, linewidth=0.8)
        axes.axhline(border, color=_INK, linewidth=0.8)
    _remove_frame(axes)
    axes.set(xticks=[], yticks=[])
    axes.set_title(name, fontsize=11, fontweight="bold", color=_INK)


def _draw_ranks(figure: Figure, layout: DrawnLayout) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour) for colour in _colours(layout)[:16]]
    labels = [f"rank {rank}" for rank in range(len(patches))]
    style = {"ncols": 8, "frameon": False, "labelcolor": _INK}
    figure.legend(handles=patches, labels=labels, loc="outside lower center", **style)


def _remove_frame(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=_GREY, labelsize=9)
