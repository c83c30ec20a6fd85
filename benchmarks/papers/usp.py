"""USP: the share of two A800 nodes' peak that training Llama 3 8B on 208K tokens reaches."""

from __future__ import annotations

import numpy as np

from benchmarks.papers import megatron
from benchmarks.papers.frame import Paper, Point
from benchmarks.papers.training import flops, least_checkpointing
from seqpar import Layout
from seqpar.balance import Cluster, Model

TOKENS = 208 * 1024
CLUSTER, MODEL = Cluster.preset("2x8-a800"), Model.preset("llama-8b")
SOURCE = "abstract of arXiv 2405.07719"


def paper(mini: bool = False) -> Paper:
    """Return MFU as counted in two ways, of the paper's mesh and of others."""
    tokens = TOKENS // 16 if mini else TOKENS
    layout, lengths = Layout.zigzag(tokens, CLUSTER.ranks), np.array([tokens])
    peak = CLUSTER.ranks * CLUSTER.device.matmul_rate

    def mfu(seconds: float, causal: bool = True) -> float:
        return 100 * flops(MODEL, lengths, causal=causal) / seconds / peak

    kept, seconds = least_checkpointing("usp", layout, CLUSTER, MODEL, mesh=(2, 8))
    points = [
        Point("MFU, of the pairs that see each other", "%", mfu(seconds), 47, f"{SOURCE}, last version"),
        Point("MFU, of all pairs", "%", mfu(seconds, False), 86, f"{SOURCE}, first version"),
    ]
    for name, options in (
        ("Ring over 8 ranks, heads over 2", {"strategy": "usp", "mesh": (8, 2)}),
        ("Ulysses", {"strategy": "ulysses"}),
        ("Ring", {"strategy": "ring"}),
    ):
        _, other = least_checkpointing(layout=layout, cluster=CLUSTER, model=MODEL, **options)
        points.append(Point(f"the same, {name}", "%", mfu(other)))
    tensor = megatron.step(lengths, CLUSTER.ranks, CLUSTER, MODEL).seconds
    points.append(Point("the same, Megatron-LM on 16 GPUs", "%", mfu(tensor)))
    return Paper(
        "usp",
        "[USP](https://arxiv.org/abs/2405.07719)",
        "Two nodes of 8 A800, Llama 3 8B, one sequence of 208K tokens. Ours is USP with heads "
        f"inside nodes and a ring between them, zigzag, and checkpointing {kept!r}, the least that "
        "fits. MFU has no FLOPs of what is computed again.",
        tuple(points),
        assumed=("NICs are those of Zeppelin's A800 nodes, 4 of 200 Gbit/s.",),
    )
