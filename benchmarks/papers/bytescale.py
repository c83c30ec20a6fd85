"""ByteScale: its speed over static data and context parallelism, and what each step brings."""

from __future__ import annotations

from benchmarks.balance import published
from benchmarks.papers.frame import Paper, Point

SOURCE = "arXiv 2502.21231"


def paper(mini: bool = False) -> Paper:
    """Return the rows of `benchmarks.balance.published`, with what no plan could exceed."""
    points = []
    for lengths in ("github", "byted"):
        small = {"seeds": 1, "batch": 2**22} if mini else {}
        where = "abstract" if lengths == "github" else "evaluation, end-to-end"
        for row in published.bytescale(lengths, **small):
            if row["ours"] is None:  # the data loader, which is hidden here
                continue
            what = row["point"].removeprefix("ByteScale, ")
            source = f"{SOURCE}, {'ablation' if ': step' in what else where}"
            points.append(Point(what, "×", row["ours"], row["published"], source))
            if "limit" in row and "heads" not in what:
                limit = what.replace("over static", "at most over static")
                points.append(Point(limit, "×", row["limit"]))
    return Paper(
        "bytescale",
        "[ByteScale](https://arxiv.org/abs/2502.21231)",
        "1,024 H800, contexts of 2M tokens, costs of plans (`seqpar.balance`). Static DP × CP "
        "packs documents in order and cuts each pack over a group of 128 ranks. At most: all work "
        "shared evenly, and nothing sent.",
        tuple(points),
        assumed=(
            "1,024 GPUs, 16K tokens a rank and batches of 32M tokens; GitHub's lengths are like "
            "ByteScale's own where nothing was published.",
            "Which model it was is not known to us: 7B has 32 heads of keys and values, 8B has 8.",
        ),
        why=(
            "For 8B, whose keys are a quarter, the baseline loses less than was published, so no "
            'plan gains as much: see the rows "at most".',
            "A ring sends every key to every rank of a document, which alone takes longer than "
            "7B's work. With heads shared inside nodes an eighth of that goes between them.",
            "In one batch the ranks of the longest document wait for no one, so documents on as "
            "few ranks as hold them bring nothing before they are balanced: the two steps are "
            "close together only as a product.",
        ),
    )
