"""Mesh-Attention: its speed over Ring's, and the bytes that it saves, on 64 to 1,024 GPUs."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from benchmarks.papers.attention import Shape, attention
from benchmarks.papers.frame import Paper, Point
from seqpar import Layout, best_mesh
from seqpar.attention.operands import OperandShape
from seqpar.balance import Cluster
from seqpar.strategies.mesh import row_bytes, sent_bytes

SHAPE = Shape(32, 32, 128)
SOURCE = "abstract of arXiv 2512.20968"
RUNS = ((64, 2**16), (64, 2**17), (64, 2**18), (128, 2**18))  # GPUs, tokens
GROUPED = Shape(32, 8, 128)


class Gain(NamedTuple):
    """A mesh's speed over Ring's, and the share of Ring's bytes that it saves."""

    ranks: int
    tokens: int
    times: float
    less: float


def shape_of(ranks: int, heads: Shape) -> tuple[int, int]:
    """Return the shape of the mesh."""
    return best_mesh(ranks, q_heads=heads.heads, kv_heads=heads.kv_heads, head_dim=heads.head_dim)


def gain(ranks: int, tokens: int, heads: Shape = SHAPE) -> Gain:
    """Return the gain of a causal call and its backward, zigzag, on nodes of 8 H100."""
    cluster, layout = Cluster.preset(f"{ranks // 8}x8-h100"), Layout.zigzag(tokens, ranks)
    ring = attention("ring", layout, cluster, heads, True)
    mesh = attention("mesh", layout, cluster, heads, True, mesh=shape_of(ranks, heads))
    less = 1 - mesh.sent_bytes.sum() / ring.sent_bytes.sum()
    return Gain(ranks, tokens, ring.seconds / mesh.seconds, float(less))


def fewer(ranks: int, heads: Shape = SHAPE, causal: bool = True) -> float:
    """Return the percentage of Ring's bytes that a mesh saves, by formula."""
    dims = heads.head_dim, heads.head_dim
    sizes = row_bytes(OperandShape(torch.bfloat16, 1, heads.heads, heads.kv_heads, *dims))
    ours, theirs = (
        sent_bytes(shape, sizes, causal).sum() for shape in (shape_of(ranks, heads), (ranks, 1))
    )
    return 100 * float(1 - ours / theirs)


def paper(mini: bool = False) -> Paper:
    """Return gains of speed in virtual time, and of bytes up to 1,024 ranks."""
    runs = ((8, 2**14),) if mini else RUNS
    gains = [gain(*run) for run in runs]
    times = [x.times for x in gains]
    points = [
        Point("times as fast as Ring, the most", "×", max(times), 3.4, f"{SOURCE}, 256 GPUs"),
        Point("times as fast as Ring, on average", "×", statistics.fmean(times), 2.9,
              f"{SOURCE}, 256 GPUs"),
        Point("fewer bytes than Ring's on 256 GPUs", "%", fewer(256), 85.4,
              f"{SOURCE}, the most"),
        Point("fewer bytes than Ring's, on average over 64, 128 and 256 GPUs", "%",
              statistics.fmean(fewer(x) for x in (64, 128, 256)), 79.0,
              f"{SOURCE}, on average"),
    ]  # fmt: skip
    for x in gains:
        of = f"{x.ranks} GPUs, {x.tokens:,} tokens"
        points.append(Point(f"{of}: times as fast as Ring", "×", x.times))
    if not mini:
        grouped = gain(*RUNS[0], GROUPED)
        of = f"{RUNS[0][0]} GPUs, {RUNS[0][1]:,} tokens, 8 KV heads"
        points.append(Point(f"{of}: times as fast as Ring", "×", grouped.times))
        points.append(Point(f"{of}: fewer bytes", "%", 100 * grouped.less))
    for ranks in (64, 1024):
        points.append(Point(f"{ranks:,} GPUs: fewer bytes", "%", fewer(ranks)))
    return Paper("mesh", "[Mesh-Attention](https://arxiv.org/abs/2512.20968)", tuple(points))
