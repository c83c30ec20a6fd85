"""Pictures of a sweep: strong and weak scaling, where a step's time goes, memory against length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from seqpar.bench.results.report import MIB, Row
from seqpar.bench.workloads.contenders import ONE
from seqpar.bench.workloads.workloads import Workload
from seqpar.costs.profile.harness import pyplot, slug

Series = dict[str, list[tuple[float, float]]]
_MAX_BARS = 24  # per picture; those with most ranks and tokens stay


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Draw what the rows have enough points for, by the shape of the call; return the files."""
    measured = [(Workload(**row["workload"]), row) for row in rows if row["figures"] is not None]
    written = []
    for shape in dict.fromkeys(_shape(workload) for workload, _ in measured):
        mine = [(workload, row) for workload, row in measured if _shape(workload) == shape]
        for name, picture in PICTURES.items():
            figure = picture(mine, shape)
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


def _strong(points: Points, shape: str) -> Any:
    """How the time of the same batch falls with the ranks."""
    panels = _panels(points, lambda workload: workload.tokens, "seconds", with_ideal=True)
    titles = {tokens: f"{tokens:,} tokens" for tokens in panels}
    return _lines(panels, titles, f"strong scaling: {shape}", "seconds of a step", log=True)


def _weak(points: Points, shape: str) -> Any:
    """How fast a device computes, where each has as many tokens."""
    exact = [(w, row) for w, row in points if not w.tokens % w.ranks]
    panels = _panels(exact, lambda workload: workload.tokens // workload.ranks, "tflops_per_device")
    titles = {tokens: f"{tokens:,} tokens a rank" for tokens in panels}
    return _lines(panels, titles, f"weak scaling: {shape}", "TFLOP/s a device", log=False)


def _panels(
    points: Points, key: Callable[[Workload], int], figure: str, with_ideal: bool = False
) -> dict[int, Series]:
    """Return, where points have several numbers of ranks, each contender's figure by ranks."""
    panels: dict[int, Series] = {}
    for workload, row in points:
        series = panels.setdefault(key(workload), {})
        if row["contender"] != ONE:
            point = float(workload.ranks), row["figures"][figure]
            series.setdefault(row["contender"], []).append(point)
        elif with_ideal:
            ideal = float(workload.ranks), row["figures"]["ideal_seconds"]
            series.setdefault("ideal", []).append(ideal)
    return {
        tokens: series
        for tokens, series in panels.items()
        if len({x for line in series.values() for x, _ in line}) > 1
    }


def _lines(panels: dict[int, Series], titles: dict[int, str], title: str, y: str, log: bool) -> Any:
    if not panels:
        return None
    plot, count = pyplot(), len(panels)
    figure, axes = plot.subplots(
        1, count, figsize=(4.5 * count + 1, 4), layout="constrained", squeeze=False
    )
    for axis, (key, series) in zip(axes[0], panels.items(), strict=True):
        for name, line in series.items():
            dashed = {"color": "black", "linestyle": "--"} if name == "ideal" else {"marker": "o"}
            axis.plot(*zip(*sorted(line), strict=True), label=name, **dashed)
        _ticks(axis, (x for line in series.values() for x, _ in line))
        axis.set(title=titles[key], xlabel="ranks", ylabel=y)
        axis.set(yscale="log") if log else axis.set_ylim(bottom=0)
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(title)
    return figure


def _ticks(axis: Any, values: Iterable[float]) -> None:
    ticks = sorted(set(values))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{int(x):,}" for x in ticks])
    axis.minorticks_off()


def _breakdown(points: Points, shape: str) -> Any:
    """Where the time of a step goes: what one device takes, other work, exposed communication."""
    bars = [
        (f"{row['contender']}\n{w.tokens:,} on {w.ranks}", row["figures"])
        for w, row in sorted(points, key=lambda x: (x[0].ranks, x[0].tokens))
        if row["figures"]["exposed_share"] is not None and row["figures"]["ideal_seconds"]
    ][-_MAX_BARS:]
    if not bars:
        return None
    figure, axis = pyplot().subplots(figsize=(2 + 0.55 * len(bars), 4.5), layout="constrained")
    names, found = [name for name, _ in bars], [figures for _, figures in bars]
    exposed = [x["exposed_share"] * x["seconds"] for x in found]
    compute = [x["seconds"] - y for x, y in zip(found, exposed, strict=True)]
    ideal = [min(x["ideal_seconds"], y) for x, y in zip(found, compute, strict=True)]
    other = [x - y for x, y in zip(compute, ideal, strict=True)]
    bottom = [0.0] * len(bars)
    parts = {"one device, 1/P of the work": ideal, "more compute": other}
    for label, heights in (parts | {"exposed communication": exposed}).items():
        axis.bar(range(len(bars)), [x * 1e3 for x in heights], 0.7, bottom, label=label)
        bottom = [x + y * 1e3 for x, y in zip(bottom, heights, strict=True)]
    axis.set_xticks(range(len(bars)), names, rotation=90, fontsize=7)
    axis.set(ylabel="ms of a step", title=f"where a step's time goes: {shape}")
    axis.legend(fontsize=7)
    return figure


def _memory(points: Points, shape: str) -> Any:
    """What a rank holds at most, by the length of the batch."""
    panels: dict[int, Series] = {}
    for workload, row in points:
        if row["contender"] != ONE and row["figures"]["memory"] is not None:
            series = panels.setdefault(workload.ranks, {})
            point = float(workload.tokens), row["figures"]["memory"] / MIB
            series.setdefault(row["contender"], []).append(point)
    panels = {
        ranks: series for ranks, series in panels.items() if max(map(len, series.values())) > 1
    }
    if not panels:
        return None
    figure, axes = pyplot().subplots(
        1, len(panels), figsize=(4.5 * len(panels) + 1, 4), layout="constrained", squeeze=False
    )
    for axis, (ranks, series) in zip(axes[0], panels.items(), strict=True):
        for name, line in series.items():
            axis.plot(*zip(*sorted(line), strict=True), label=name, marker="o")
        _ticks(axis, (x for line in series.values() for x, _ in line))
        axis.set(
            title=f"{ranks} rank{'s' * (ranks != 1)}",
            xlabel="tokens",
            ylabel="MiB of a rank at most",
        )
        axis.set(yscale="log")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(f"memory: {shape}")
    return figure


PICTURES: dict[str, Callable[[Points, str], Any]] = {
    "strong": _strong,
    "weak": _weak,
    "breakdown": _breakdown,
    "memory": _memory,
}
