"""ring-flash-attention: its rings' speed as a percentage of one kernel's, on 8 GPUs of a node."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

from benchmarks.papers.attention import Shape, attention, one_kernel
from benchmarks.papers.frame import Paper, Point
from seqpar import Layout
from seqpar.balance import Cluster

SHAPE, TOKENS, RANKS = Shape(32, 8, 128), 8192, 8  # Llama 3.1 8B, tokens per GPU
# benchmark_varlen_kvpacked_func.py: alternating packs, times the number of GPUs in a ring
PACKS = (
    (0, 8192),
    (0, 256, 7648, 8192),
    (0, 4096, 8192),
    (0, 3104, 6304, 7904, 8064, 8192),
)
SOURCE = "README, Performance Summary"
# README: iterations per second of FlashAttention on one GPU, over 8; and percent of it, by layout.
BATCH = {
    ("h800", False): (73.9, {"contiguous": 52.1, "zigzag": 85.2, "striped": 74.4}),
    ("h800", True): (19.3, {"contiguous": 53.9, "zigzag": 90.2, "striped": 82.9}),
    ("a100", False): (46.7, {"contiguous": 51.4, "zigzag": 81.7, "striped": 69.6}),
    ("a100", True): (11.8, {"contiguous": 52.5, "zigzag": 89.8, "striped": 82.6}),
}
PACKED = {
    ("h800", False): {"contiguous": 49.1, "zigzag": 70.2},
    ("h800", True): {"contiguous": 51.1, "zigzag": 75.9},
    ("a100", False): {"contiguous": 49.8, "zigzag": 72.0},
    ("a100", True): {"contiguous": 52.1, "zigzag": 80.2},
}


def visits(name: str, rank: int) -> list[float]:
    """Return the share of its rows that a rank merges in each round of their ring."""
    before, behind = rank, RANKS - 1 - rank  # ranks; the keys of each arrive in one round
    return {
        "contiguous": [1.0] * before,
        "zigzag": [1.0] * before + [0.5] * behind,
        "striped": [1.0] * (before + behind),
    }[name]


def merging(name: str, backward: bool) -> Callable[[int], None]:
    """Return their ring's merges by torch's operators, which our kernel does itself.

    In forward, a round's result in bf16 is merged into a result in fp32, with both lse. In
    backward, a round's gradient of queries is added to the sum, and the gradients of keys and
    values are added to the received ones.
    """

    def merge(rank: int) -> None:
        def empty(share: float, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(int(share * TOKENS), heads, width, dtype=dtype, device="meta")

        for share in visits(name, rank):
            part = empty(share, SHAPE.heads, SHAPE.head_dim, torch.bfloat16)
            total, lse = torch.empty_like(part, dtype=torch.float32), part[..., :1].float()
            total - torch.sigmoid(lse - lse) * (total - part.float())
            lse - F.logsigmoid(lse - lse)
            if backward:
                total.add_(part)
                keys = empty(1.0, SHAPE.kv_heads, 2 * SHAPE.head_dim, torch.float32)
                keys.add_(keys)

    return merge


def percent(
    cluster: Cluster, packs: tuple[tuple[int, ...], ...], name: str, way: bool, merged: bool
) -> float:
    """Return a ring's speed with a layout, as a percentage of one kernel's."""
    ideal = took = 0.0
    behind = merging(name, way) if merged else None
    for pack in packs:
        lengths = [stop - start for start, stop in pairwise(pack)]
        # One kernel does 1/P of the work. A ring on P ranks has P² times as much.
        ideal += RANKS * one_kernel(cluster, lengths, SHAPE, way)
        layout = getattr(Layout, name)([RANKS * edge for edge in pack], RANKS)
        took += attention("ring", layout, cluster, SHAPE, way, behind).seconds
    return 100 * ideal / took


def paper(mini: bool = False) -> Paper:
    """Return the README's table, packed documents included."""
    points = []
    for (device, way), (kernel, shares) in BATCH.items():
        if mini and (device, way) != ("h800", False):
            continue
        cluster = Cluster.preset(f"1x8-{device}")
        of = f"{device.upper()}, {'forward and backward' if way else 'forward'}"
        speed = 1 / one_kernel(cluster, [TOKENS], SHAPE, way) / RANKS
        points.append(Point(f"{of}: one kernel, over 8", "iterations/s", speed, kernel, SOURCE))
        for packs, kind, known, source in (
            (PACKS[:1], "", shares, SOURCE),
            (PACKS[1:2] if mini else PACKS, ", packed", PACKED[device, way], f"{SOURCE}, varlen"),
        ):
            for name, published in known.items():
                if mini and name != "zigzag":
                    continue
                theirs = percent(cluster, packs, name, way, merged=True)
                points.append(Point(f"{of}{kind}: {name}", "%", theirs, published, source))
            ours = percent(cluster, packs, "zigzag", way, merged=False)
            points.append(Point(f"{of}{kind}: zigzag, ours", "%", ours))
    return Paper(
        "ring_flash_attention",
        "[ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention)",
        tuple(points),
    )
