"""The frame of all papers: published and predicted points, as a table and a picture.

Each paper's module has a function `paper(mini)` that computes a `Paper`. With `mini`, for tests, it
computes fewer points. No time is measured, so the same code gives the same figures everywhere.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, harness
from benchmarks.papers.notes import NOTES

FOLDER = RESULTS / "papers"


@dataclass(frozen=True)
class Point:
    """A figure of a paper, and our prediction.

    Attributes:
        what: the name of the figure.
        unit: "×", "%", "ms" and the like.
        predicted: the result of our code in virtual time, or of our costs.
        published: the printed figure; None if the paper has no such figure.
        source: the section, table, figure or file that prints it; empty if not published.
        fitted: whether a constant was fitted to this point, whose error then means nothing.
    """

    what: str
    unit: str
    predicted: float
    published: float | None = None
    source: str = ""
    fitted: bool = False

    def __post_init__(self) -> None:
        if (self.published is None) != (not self.source):
            raise ValueError(f"source: {self.what!r} must have one if and only if it was published")
        if not math.isfinite(self.predicted):
            raise ValueError(f"predicted: {self.what!r} is {self.predicted}")
        rounded = float(f"{self.predicted:.5g}")  # the same on machines that sum in another order
        object.__setattr__(self, "predicted", rounded)

    @property
    def error(self) -> float | None:
        """The relative error; None for an unpublished figure."""
        return None if self.published is None else self.predicted / self.published - 1


@dataclass(frozen=True)
class Paper:
    """A paper's figures.

    Attributes:
        name: the name of its module and files.
        title: the title, with a link.
        points: the figures. `notes.py` explains them.
    """

    name: str
    title: str
    points: tuple[Point, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, each point with its error."""
        values = asdict(self)
        for point, found in zip(values["points"], self.points, strict=True):
            point["error"] = None if found.error is None else round(found.error, 4)
        return values

    def section(self) -> str:
        """Return the paper's part of the page, as Markdown."""
        notes = [f"| {topic} | {note} |" for topic, note in NOTES.get(self.name, ())]
        parts = [f"### {self.title}", "\n".join(["| about | note |", "|---|---|", *notes])]
        parts.append(table(self.points))
        picture = f"../../benchmarks/results/papers/{self.name}.png"
        parts.append(f"![Published and predicted figures of {self.name}]({picture})")
        return "\n\n".join(parts) + "\n"


def summary(papers: list[Paper]) -> str:
    """Return a row for each paper, with the errors of its figures that were not fitted."""
    head = "paper", "figures", "half are within", "all are within"
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for paper in papers:
        errors = [abs(x.error) for x in paper.points if x.error is not None and not x.fitted]
        cells = str(len(errors)), f"{statistics.median(errors):.0%}", f"{max(errors):.0%}"
        lines.append(f"| {' | '.join((paper.title, *cells))} |")
    return "\n".join(lines)


def table(points: tuple[Point, ...]) -> str:
    """Return points as a table."""
    lines = ["| figure | published | predicted | error | source |", "|---" * 5 + "|"]
    for x in points:
        published = "" if x.published is None else shown(x.published, x.unit)
        error = "" if x.error is None else "fitted" if x.fitted else f"{round(x.error, 2):+.0%}"
        cells = x.what, published, shown(x.predicted, x.unit), error, x.source
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(value: float, unit: str) -> str:
    """Return a value with three digits or more, and its unit."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    space = "" if unit in ("×", "%") else " "
    return f"{value:,.{digits}f}{space}{unit}"


def write(paper: Paper) -> None:
    """Write a paper's JSON and its picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{paper.name}.json"
    path.write_text(json.dumps(paper.as_dict(), indent=1, ensure_ascii=False) + "\n")
    plot(paper, path.with_suffix(".png"))


def read(path: Path) -> Paper:
    """Return the paper that `write` wrote."""
    values = json.loads(path.read_text())
    points = tuple(
        Point(**{name: value for name, value in point.items() if name != "error"})
        for point in values.pop("points")
    )
    return Paper(values["name"], values["title"], points)


def plot(paper: Paper, path: Path) -> None:
    """Draw published and predicted points in rows, one panel per unit."""
    units = list(dict.fromkeys(x.unit for x in paper.points))
    parts = [[x for x in paper.points if x.unit == unit] for unit in units]
    plt = harness.pyplot()
    figure, axes = plt.subplots(
        len(units),
        squeeze=False,
        figsize=(9, 0.8 + sum(0.5 + 0.3 * len(part) for part in parts)),
        height_ratios=[1 + len(part) for part in parts],
        layout="constrained",
    )
    for axis, unit, part in zip(axes[:, 0], units, parts, strict=True):
        for row, x in enumerate(part):
            if x.published is not None:
                axis.plot([x.published, x.predicted], [row, row], color="0.8", zorder=1)
                axis.plot(x.published, row, "o", mfc="white", mec="C0", ms=8)
            axis.plot(x.predicted, row, "o" if x.published is not None else "D", color="C1", ms=5)
        axis.set_yticks(range(len(part)), [x.what for x in part], fontsize=8)
        axis.set(ylim=(len(part) - 0.4, -0.6), xlabel=unit)
        values = [y for x in part for y in (x.published, x.predicted) if y]
        if max(values) > 8 * min(values):
            axis.set_xscale("log")
        else:
            axis.set_xlim(left=0)
        axis.grid(axis="x", color="0.9")
    figure.suptitle(f"{paper.name}: published (rings) and predicted (dots)", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
