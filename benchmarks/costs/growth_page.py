"""Draw `growth.json`: a picture per strategy in docs/images/growth, and the tables of the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS, harness
from benchmarks.costs.growth import PLAYED_RANKS, RANKS, TOKENS, TOKENS_PER_RANK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
PAGE, IMAGES = DOCS / "benchmarks/growth.md", DOCS / "images/growth"
GENERATED = re.compile(r"<!-- written from growth.json -->\n.*?<!-- end -->\n", re.DOTALL)
COLOURS = {"dense": "#4477aa", "window": "#228833", "linear": "#aa3377"}
MEMORY_BYTES = 80e9  # of an H100

Row = dict[str, Any]
PANELS = (
    ("sent by a rank, GB", lambda row: row["bytes"] / 1e9),
    ("messages of a rank", lambda row: row["messages"]),
    ("memory of a rank, GB", lambda row: row["peak_bytes"] / 1e9),
    ("host lists messages, ms", lambda row: row["host_seconds"] * 1e3),
    ("predicted, ms", lambda row: row["seconds"] * 1e3),
    ("speed over ideal, %", lambda row: 100 * row["ideal_seconds"] / row["seconds"]),
)


def rows_of() -> list[Row]:
    found: list[Row] = json.loads(next(RESULTS.rglob("growth.json")).read_text())["rows"]
    return found


def draw(strategy: str, rows: list[Row]) -> Path:
    """Draw a strategy's rows, and return the picture's path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained", facecolor="white")
    for axes, (title, value) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            for weak, style in ((True, "o-"), (False, "s--")):
                line = [
                    (x["ranks"], value(x))
                    for x in rows
                    if x["kind"] == kind
                    and x["tokens"] == (x["ranks"] * TOKENS_PER_RANK if weak else TOKENS)
                ]
                label = f"{kind}, {'weak' if weak else 'strong'} scaling"
                axes.plot(*zip(*line, strict=True), style, ms=3, c=COLOURS[kind], label=label)
        _finish(axes, title)
    figure.axes[2].axhline(MEMORY_BYTES / 1e9, color="black", linewidth=0.8, linestyle=":")
    if strategy == "ulysses":
        for axes in figure.axes:
            axes.axvline(32, color="0.6", linewidth=0.8)
        figure.axes[5].annotate("32 heads", (36, 60), fontsize=8, color="0.4")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    path = IMAGES / f"{strategy}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=72)
    return path


def _finish(axes: Axes, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([8, 128, 2048, 16384], ["8", "128", "2,048", "16,384"])
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def fastest(rows: list[Row]) -> str:
    """Return a table of the strategies that are predicted fastest, among those that fit."""
    columns = [(kind, weak) for kind in ("dense", "window", "linear") for weak in (True, False)]
    head = ["ranks", *(f"{kind}, {'weak' if weak else 'strong'}" for kind, weak in columns)]
    lines = []
    for ranks in RANKS:
        cells = [f"{ranks:,}"]
        for kind, weak in columns:
            tokens = ranks * TOKENS_PER_RANK if weak else TOKENS
            fitting = [
                row
                for row in rows
                if (row["kind"], row["ranks"], row["tokens"]) == (kind, ranks, tokens)
                and row["peak_bytes"] < MEMORY_BYTES
                and row["strategy"] != "recurrent"  # another kind of layer
            ]
            names = [row["strategy"] for row in sorted(fitting, key=lambda row: row["seconds"])]
            cells.append(", ".join(names[:2]))
        lines.append(cells)
    return harness.table(head, lines)


def generated(rows: list[Row]) -> str:
    head = "strategy", "layer", "sent, GB", "messages", "memory, GB", "host, ms", "predicted, ms"
    head += "of ideal", f"predicted / simulated, {PLAYED_RANKS} ranks"
    lines = []
    for row in rows:
        if row["ranks"] != RANKS[-1] or row["tokens"] == TOKENS:
            continue
        [played] = [
            x["seconds"] / x["played_seconds"]
            for x in rows
            if x["played_seconds"] and (x["strategy"], x["kind"]) == (row["strategy"], row["kind"])
        ]
        cells = [f"{value(row):,.3g}" if value(row) < 100 else f"{value(row):,.0f}"
                 for _, value in PANELS[:-1]]  # fmt: skip
        ideal = 100 * row["ideal_seconds"] / row["seconds"]
        lines.append([row["strategy"], row["kind"], *cells, f"{ideal:.2g}%", f"{played:.2f}"])
    parts = [harness.table(head, lines), "## The two fastest that fit in memory", fastest(rows)]
    parts.append("## Pictures")
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        name = f"{strategy}.png"
        parts.append(f"![How the cost of {strategy} grows](../images/growth/{name})")
    return "<!-- written from growth.json -->\n\n" + "\n\n".join(parts) + "\n\n<!-- end -->\n"


def page(rows: list[Row]) -> str:
    return GENERATED.sub(lambda _: generated(rows), PAGE.read_text())


def main() -> None:
    rows = rows_of()
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        draw(strategy, [row for row in rows if row["strategy"] == strategy])
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
