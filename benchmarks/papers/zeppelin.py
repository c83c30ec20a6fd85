"""Zeppelin: its speed over an even split, and what each of its parts brings."""

from __future__ import annotations

from benchmarks.balance import published
from benchmarks.papers.frame import Paper, Point

# Where `benchmarks.balance.published` has each figure from; its other rows are ours alone.
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
    """Return the rows of `benchmarks.balance.published`, and the same beside a fair baseline."""
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
    return Paper(
        "zeppelin",
        "[Zeppelin](https://arxiv.org/abs/2509.21841)",
        "Nodes of A800, H800 and H200, LLaMA 3B to 30B, 16 to 128 GPUs, 4K tokens a GPU, costs of "
        "plans (`seqpar.balance`). The even split is Transformer Engine's: the keys of all "
        "documents go round the ring of all ranks, between nodes over one NIC each.",
        tuple(points),
        assumed=(
            "Its ArXiv lengths are not public: batches of ProLong and GitHub stand for them, whose "
            "longest document is the batch.",
            "The even split has no launches, merges or padding's memory: it is favoured.",
        ),
        why=(
            "A round takes 5.3 times as long over one NIC as over four by what was published, "
            "which is more than four NICs bring, and 0.411 ms fits no model of its table at a "
            "NIC's rate. Ours is 7B's.",
            "What the even split waits for most is that one NIC. Where it is routed over all NICs, "
            f"which is the fair baseline, plans are {fair:.2f} times as fast in the mean.",
            "Remapping brings little here, since a plan by Zeppelin's rule is bound by messages.",
        ),
    )
