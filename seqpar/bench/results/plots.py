"""Plots of a sweep: strong and weak scaling, the parts of a step's time, and memory by length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from seqpar.bench.results.results_file import Row
from seqpar.bench.results.sweep_report import MIB
from seqpar.bench.workloads.contenders import ONE
from seqpar.bench.workloads.workloads import Workload
from seqpar.costs.profile.harness import pyplot, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = dict[str, list[tuple[float, float]]]
_MAX_BARS = 24  # the most bars in a plot; those with few ranks and tokens are left out


def draw(rows: list[Row], folder: Path) -> list[Path]:
    measured = [(Workload(**row["workload"]), row) for row in rows if row["figures"] is not None]
    written = []
    for shape in dict.fromkeys(_shape(workload) for workload, _ in measured):
        mine = [(workload, row) for workload, row in measured if _shape(workload) == shape]
        for name, plot in PLOTS.items():
            figure = plot(mine, shape)
            if figure is not None:
                path = folder / f"{name}-{slug(shape)}.png"
                figure.savefig(path, dpi=150)
                pyplot().close(figure)
                written.append(path)
    return written


def _shape(workload: Workload) -> str:
    heads = f"{workload.heads}:{workload.kv_heads}x{workload.head_dim}"
    return f"{heads}, {workload.mask}, {workload.dtype}, {workload.passes}"


Points = list[tuple[Workload, Row]]


def _strong(points: Points, shape: str) -> Figure | None:
    """Plot the seconds of one batch over the number of ranks."""
    panels = _panels(points, lambda w: (w.tokens, w.ranks), "seconds", with_ideal=True)
    titles = {tokens: f"{tokens:,} tokens" for tokens in panels}
    return _lines(panels, titles, f"strong scaling: {shape}", "seconds of a step", log=True)


def _weak(points: Points, shape: str) -> Figure | None:
    """Plot FLOP/s per device over the number of ranks, with the same number of tokens on each
    device.
    """
    exact = [(w, row) for w, row in points if not w.tokens % w.ranks]
    panels = _panels(exact, lambda w: (w.tokens // w.ranks, w.ranks), "tflops_per_device")
    titles = {tokens: f"{tokens:,} tokens per rank" for tokens in panels}
    return _lines(panels, titles, f"weak scaling: {shape}", "TFLOP/s per device", log=False)


def _panels(
    points: Points,
    key: Callable[[Workload], tuple[int, int]],
    figure: str,
    factor: float = 1.0,
    with_ideal: bool = False,
) -> dict[int, Series]:
    """Return the lines of each panel of a plot. `key` returns the panel and the x value of a point.
    Panels with a single x value are left out.
    """
    panels: dict[int, Series] = {}
    for workload, row in points:
        panel, x = key(workload)
        is_ideal = row["contender"] == ONE
        y = (row["figures"] or {})["ideal_seconds" if is_ideal else figure]
        if y is not None and (with_ideal or not is_ideal):
            series = panels.setdefault(panel, {})
            name = "ideal" if is_ideal else row["contender"]
            series.setdefault(name, []).append((float(x), y * factor))
    return {
        panel: series
        for panel, series in panels.items()
        if len({x for line in series.values() for x, _ in line}) > 1
    }


def _lines(
    panels: dict[int, Series], names: dict[int, str], head: str, y: str, log: bool, x: str = "ranks"
) -> Figure | None:
    if not panels:
        return None
    count = len(panels)
    figure: Figure
    figure, axes = pyplot().subplots(
        1, count, figsize=(4.5 * count + 1, 4), layout="constrained", squeeze=False
    )
    for axis, (key, series) in zip(axes[0], panels.items(), strict=True):
        for name, line in series.items():
            style = {"color": "black", "linestyle": "--"} if name == "ideal" else {"marker": "o"}
            axis.plot(*zip(*sorted(line), strict=True), label=name, **style)
        _ticks(axis, (value for line in series.values() for value, _ in line))
        axis.set(title=names[key], xlabel=x, ylabel=y)
        axis.set(yscale="log") if log else axis.set_ylim(bottom=0)
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(head)
    return figure


def _ticks(axis: Axes, values: Iterable[float]) -> None:
    ticks = sorted(set(values))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{int(x):,}" for x in ticks])
    axis.minorticks_off()


def _breakdown(points: Points, shape: str) -> Figure | None:
    """Plot the parts of a step: the work of one device, additional work, and exposed
    communication.
    """
    bars = []
    for workload, row in sorted(points, key=lambda point: (point[0].ranks, point[0].tokens)):
        figures = row["figures"] or {}
        if figures["exposed_share"] is not None and figures["ideal_seconds"]:
            name = f"{row['contender']}\n{workload.tokens:,} on {workload.ranks}"
            bars.append((name, figures))
    bars = bars[-_MAX_BARS:]
    if not bars:
        return None
    figure: Figure
    figure, axis = pyplot().subplots(figsize=(2 + 0.55 * len(bars), 4.5), layout="constrained")
    names = [name for name, _ in bars]
    exposed = [x["exposed_share"] * x["seconds"] for _, x in bars]
    compute = [x["seconds"] - y for (_, x), y in zip(bars, exposed, strict=True)]
    ideal = [min(x["ideal_seconds"], y) for (_, x), y in zip(bars, compute, strict=True)]
    other = [x - y for x, y in zip(compute, ideal, strict=True)]
    bottom = [0.0] * len(bars)
    parts = {"one device, 1/P of the work": ideal, "more compute": other}
    for label, heights in (parts | {"exposed communication": exposed}).items():
        axis.bar(range(len(bars)), [x * 1e3 for x in heights], 0.7, bottom, label=label)
        bottom = [x + y * 1e3 for x, y in zip(bottom, heights, strict=True)]
    axis.set_xticks(range(len(bars)), names, rotation=90, fontsize=7)
    axis.set(ylabel="ms per step", title=f"parts of a step's time: {shape}")
    axis.legend(fontsize=7)
    return figure


def _memory(points: Points, shape: str) -> Figure | None:
    """Plot the peak memory of a rank over the length of the batch."""
    panels = _panels(points, lambda w: (w.ranks, w.tokens), "memory", 1 / MIB)
    titles = {ranks: f"{ranks} rank{'s' * (ranks != 1)}" for ranks in panels}
    title, y = f"memory: {shape}", "peak MiB of a rank"
    return _lines(panels, titles, title, y, log=True, x="tokens")


PLOTS: dict[str, Callable[[Points, str], Figure | None]] = {
    "strong": _strong,
    "weak": _weak,
    "breakdown": _breakdown,
    "memory": _memory,
}
