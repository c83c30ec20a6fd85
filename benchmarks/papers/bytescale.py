"""ByteScale: its speed over static data and context parallelism, and each step's gain."""

from __future__ import annotations

from benchmarks.balance import published
from benchmarks.papers.frame import Paper, Point

SOURCE = "arXiv 2502.21231"


def paper(mini: bool = False) -> Paper:
    """Return the rows of `benchmarks.balance.published`, with the limits of all plans."""
    points = []
    for lengths in ("github", "byted"):
        small = {"seeds": 1, "batch": 2**22} if mini else {}
        where = "abstract" if lengths == "github" else "evaluation, end-to-end"
        for row in published.bytescale(lengths, **small):
            if row["ours"] is None:  # the data loader, whose time is hidden here
                continue
            what = row["point"].removeprefix("ByteScale, ")
            source = f"{SOURCE}, {'ablation' if ': step' in what else where}"
            points.append(Point(what, "×", row["ours"], row["published"], source))
            if "limit" in row and "heads" not in what:
                limit = what.replace("over static", "at most over static")
                points.append(Point(limit, "×", row["limit"]))
    return Paper("bytescale", "[ByteScale](https://arxiv.org/abs/2502.21231)", tuple(points))
