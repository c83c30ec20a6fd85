"""Compare published figures of papers with our code in virtual time.

A file of `data/` has a paper's title, notes, and figures with their sources. The function of the
same name in `PAPERS` predicts the figures, by our code in virtual time or by our costs. The program
does this for the named papers, or for all. It writes a JSON and a picture of each to
`benchmarks/results/papers`, and the end of `docs/benchmarks/papers.md`. No time is measured, so the
same code gives the same figures everywhere.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, harness
from benchmarks.papers import (
    distca,
    gated_delta,
    lasp2,
    lightseq,
    mesh,
    plans,
    ring_flash_attention,
    token_ring,
    ulysses,
    usp,
)

FOLDER = RESULTS / "papers"
PAGE = Path(__file__).parents[2] / "docs/benchmarks/papers.md"
MARK = "<!-- What follows is written by benchmarks.papers.run. -->\n"
Figures = dict[str, float]  # predicted, by name
Paper = dict[str, Any]  # as JSON: its name, title and points
# In the order of the page. With `mini`, for tests, a function predicts fewer or smaller figures.
PAPERS: dict[str, Callable[[bool], Figures]] = {
    "ulysses": ulysses.predict,
    "ring_flash_attention": ring_flash_attention.predict,
    "token_ring": token_ring.predict,
    "mesh": mesh.predict,
    "usp": usp.predict,
    "lightseq": lightseq.predict,
    "lasp2": lasp2.predict,
    "gated_delta": gated_delta.predict,
    "distca": distca.predict,
    "zeppelin": plans.zeppelin,
    "bytescale": plans.bytescale,
    "dynamic_cp": plans.dynamic_cp,
    "fcp": plans.fcp,
}


def data_of(name: str) -> dict[str, Any]:
    """Return a paper's title, notes and figures."""
    return tomllib.loads((Path(__file__).parent / f"data/{name}.toml").read_text())


def compared(name: str, found: Figures) -> Paper:
    """Return a paper with a point for each predicted figure, in the order of its data."""
    data, points = data_of(name), []
    names = [figure[0] for figure in data["figures"]]
    if unknown := set(found) - set(names):
        raise ValueError(f"data/{name}.toml has no figures {sorted(unknown)}")
    for what, unit, *known in data["figures"]:
        if what not in found:
            continue
        if not math.isfinite(found[what]):
            raise ValueError(f"{name}: {what!r} is {found[what]}")
        published, source, fitted = (*known, False)[:3] if known else (None, "", False)
        predicted = float(f"{found[what]:.5g}")  # the same on machines that sum in another order
        error = None if published is None else round(predicted / published - 1, 4)
        point = {"what": what, "unit": unit, "predicted": predicted, "published": published}
        points.append(point | {"source": source, "fitted": fitted, "error": error})
    return {"name": name, "title": data["title"], "points": points}


def section(paper: Paper) -> str:
    """Return a paper's part of the page."""
    name, rows = paper["name"], []
    for x in paper["points"]:
        published = "" if x["published"] is None else shown(x["published"], x["unit"])
        error = "" if published == "" else "fitted" if x["fitted"] else signed(x)
        rows.append([x["what"], published, shown(x["predicted"], x["unit"]), error])
    sources = dict.fromkeys(x["source"] for x in paper["points"] if x["source"])
    picture = f"../../benchmarks/results/papers/{name}.png"
    parts = [
        f"### {paper['title']}",
        harness.table(["about", "note"], data_of(name)["notes"]),
        harness.table(["figure", "published", "predicted", "error"], rows),
        f"Published in: {'; '.join(sources)}.",
        f"![Published and predicted figures of {name}]({picture})",
    ]
    return "\n\n".join(parts) + "\n"


def signed(point: dict[str, Any]) -> str:
    """Return the relative error of a prediction."""
    return f"{round(point['predicted'] / point['published'] - 1, 2):+.0%}"


def summary(papers: list[Paper]) -> str:
    """Return a row for each paper, with the errors of its figures that were not fitted."""
    rows = []
    for paper in papers:
        points = [x for x in paper["points"] if x["published"] is not None and not x["fitted"]]
        errors = [abs(x["predicted"] / x["published"] - 1) for x in points]
        half, most = statistics.median(errors), max(errors)
        rows.append([paper["title"], str(len(errors)), f"{half:.0%}", f"{most:.0%}"])
    return harness.table(["paper", "published figures", "median error", "largest error"], rows)


def shown(value: float, unit: str) -> str:
    """Return a value with three digits or more, and its unit."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    space = "" if unit in ("×", "%") else " "
    return f"{value:,.{digits}f}{space}{unit}"


def generated() -> str:
    """Return the page's end, from the JSON of all written papers."""
    paths = [FOLDER / f"{name}.json" for name in PAPERS]
    papers = [json.loads(path.read_text()) for path in paths if path.exists()]
    return "\n".join([f"{MARK}\n{summary(papers)}\n", *map(section, papers)])


def write(paper: Paper) -> None:
    """Write a paper's JSON and its picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{paper['name']}.json"
    path.write_text(json.dumps(paper, indent=1, ensure_ascii=False) + "\n")
    plot(paper, path.with_suffix(".png"))


def plot(paper: Paper, path: Path) -> None:
    """Draw published and predicted points in rows, one panel per unit."""
    units = list(dict.fromkeys(x["unit"] for x in paper["points"]))
    parts = [[x for x in paper["points"] if x["unit"] == unit] for unit in units]
    figure, axes = harness.pyplot().subplots(
        len(units),
        squeeze=False,
        figsize=(9, 0.8 + sum(0.5 + 0.3 * len(part) for part in parts)),
        height_ratios=[1 + len(part) for part in parts],
        layout="constrained",
    )
    for axis, unit, part in zip(axes[:, 0], units, parts, strict=True):
        for row, x in enumerate(part):
            published, predicted = x["published"], x["predicted"]
            if published is not None:
                axis.plot([published, predicted], [row, row], color="0.8", zorder=1)
                axis.plot(published, row, "o", mfc="white", mec="C0", ms=8)
            axis.plot(predicted, row, "D" if published is None else "o", color="C1", ms=5)
        axis.set_yticks(range(len(part)), [x["what"] for x in part], fontsize=8)
        axis.set(ylim=(len(part) - 0.4, -0.6), xlabel=unit)
        values = [y for x in part for y in (x["published"], x["predicted"]) if y]
        if max(values) > 8 * min(values):
            axis.set_xscale("log")
        else:
            axis.set_xlim(left=0)
        axis.grid(axis="x", color="0.9")
    figure.suptitle(f"{paper['name']}: published (rings) and predicted (dots)", fontsize=10)
    figure.savefig(path, dpi=110)
    harness.pyplot().close(figure)


def main() -> None:
    options = harness.arguments_of(
        __doc__,
        {
            "--only": ([*PAPERS], "names of papers", [*PAPERS]),
            "--no-write": (False, "only print: write no files"),
        },
    )
    for name in options.only:
        paper = compared(name, PAPERS[name](False))
        if not options.no_write:
            write(paper)
        print(section(paper), flush=True)
    if not options.no_write:
        head, _, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(f"{head}{generated()}")


if __name__ == "__main__":
    main()
