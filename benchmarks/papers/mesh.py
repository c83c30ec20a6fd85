"""Mesh-Attention: its speed over Ring's, and the bytes that it saves, on 64 to 1,024 GPUs."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from benchmarks.papers.virtual_time import Shape, attention
from seqpar import Layout, best_mesh
from seqpar.attention.operands import OperandShape
from seqpar.balance import Cluster
from seqpar.strategies.mesh import row_bytes, sent_bytes

SHAPE = Shape(32, 32, 128)
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


def predict(mini: bool) -> dict[str, float]:
    """Return gains of speed in virtual time, and of bytes up to 1,024 ranks."""
    gains = [gain(*run) for run in (((8, 2**14),) if mini else RUNS)]
    times = [x.times for x in gains]
    most, average = "times as fast as Ring, largest", "times as fast as Ring, on average"
    found = {most: max(times), average: statistics.fmean(times)}
    bytes_saved = [fewer(ranks) for ranks in (64, 128, 256)]
    found["fewer bytes than Ring's on 256 GPUs"] = bytes_saved[-1]
    of = "fewer bytes than Ring's, on average over 64, 128 and 256 GPUs"
    found[of] = statistics.fmean(bytes_saved)
    for x in gains:
        found[f"{x.ranks} GPUs, {x.tokens:,} tokens: times as fast as Ring"] = x.times
    if not mini:
        grouped = gain(*RUNS[0], GROUPED)
        of = f"{RUNS[0][0]} GPUs, {RUNS[0][1]:,} tokens, 8 KV heads"
        found[f"{of}: times as fast as Ring"] = grouped.times
        found[f"{of}: fewer bytes"] = 100 * grouped.less
    for ranks in (64, 1024):
        found[f"{ranks:,} GPUs: fewer bytes"] = fewer(ranks)
    return found
