"""ring-flash-attention: its rings' speed as a percentage of one kernel's, on 8 GPUs of a node."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import torch
import torch.nn.functional as F

from benchmarks.papers.virtual_time import Shape, attention, one_kernel
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
LAYOUTS, PACKED_LAYOUTS = ("contiguous", "zigzag", "striped"), ("contiguous", "zigzag")


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


def predict(mini: bool) -> dict[str, float]:
    """Return the README's table, packed documents included."""
    found = {}
    for device, way in [("h800", False)] if mini else product(("h800", "a100"), (False, True)):
        cluster = Cluster.preset(f"1x8-{device}")
        of = f"{device.upper()}, {'forward and backward' if way else 'forward'}"
        kernel = one_kernel(cluster, [TOKENS], SHAPE, way)
        found[f"{of}: one kernel, over 8"] = 1 / kernel / RANKS
        for packs, kind, layouts in (
            (PACKS[:1], "", LAYOUTS),
            (PACKS[1:2] if mini else PACKS, ", packed", PACKED_LAYOUTS),
        ):
            for name in ("zigzag",) if mini else layouts:
                theirs = percent(cluster, packs, name, way, merged=True)
                found[f"{of}{kind}: {name}"] = theirs
            ours = percent(cluster, packs, "zigzag", way, merged=False)
            found[f"{of}{kind}: zigzag, ours"] = ours
    return found
