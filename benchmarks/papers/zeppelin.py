"""Zeppelin: its speed over an even split, and the gain of each part."""

from __future__ import annotations

from benchmarks.balance import published
from benchmarks.papers.frame import Paper, Point

# Sources of the rows of `benchmarks.balance.published`; its other rows are unpublished.
SOURCES = {
    "Zeppelin, over an even split, mean": "abstract",
    "Zeppelin, over an even split, most": "evaluation, end-to-end",
    "Zeppelin's routing alone": "ablation",
    "Zeppelin's partition and engine, most": "ablation, ArXiv",
    "Zeppelin's remapping, over the same without": "ablation",
    "Zeppelin, a round of the even split, 7B on A800, ms": "case study",
    "the same over 4 NICs, ms": "case study",
}


def paper(mini: bool = False) -> Paper:
    """Return the rows of `benchmarks.balance.published`, and the speed over a fair baseline."""
    rows = published.zeppelin(("llama-3b",), (16,)) if mini else published.zeppelin()
    points = []
    for row in rows:
        what, unit = row["point"], "ms" if row["point"].endswith(", ms") else "×"
        what = what.removesuffix(", ms")
        source = SOURCES.get(row["point"])
        known = (row["published"], f"arXiv 2509.21841, {source}") if source else (None, "")
        points.append(Point(what, unit, row["ours"], *known))
    over = {point.what: point.predicted for point in points}
    fair = over["Zeppelin, over an even split, mean"] / over["Zeppelin's routing alone"]
    points.append(Point("Zeppelin, over an even split that is routed, mean", "×", fair))
    return Paper("zeppelin", "[Zeppelin](https://arxiv.org/abs/2509.21841)", tuple(points))
