"""TokenRing: steps of its causal forward and of Ring's, on four A10 on PCIe."""

from __future__ import annotations

import statistics
from itertools import pairwise

import torch

from benchmarks.papers.attention import Shape, attention
from benchmarks.papers.frame import Paper, Point
from seqpar import Layout
from seqpar.balance import Cluster, Link
from seqpar.costs.devices import A100_FLOPS_PER_SECOND, gpu
from seqpar.simulate import Outcome
from seqpar.tracing.trace import Event

SHAPE, TOKENS, RANKS = Shape(32, 32, 128), 24000, 4  # LLaMA2-7B
PEAK, MEMORY, BANDWIDTH = 125e12, 24e9, 600e9  # data sheet "NVIDIA A10"
A10 = gpu("A10", MEMORY, PEAK, BANDWIDTH, PEAK * A100_FLOPS_PER_SECOND / 312e12)
ROUND = 7.6e-3  # published seconds of a round of Ring, which is the time of its message
MESSAGE = 2 * TOKENS // RANKS * SHAPE.kv_heads * SHAPE.head_dim * 2  # bytes of keys and values
SOURCE = "README, Performance"
PCIE = Link(10e-6, MESSAGE / ROUND)
CLUSTER = Cluster("4x-a10", 1, RANKS, 0, A10, PCIE, PCIE, PCIE)


def computes(outcome: Outcome) -> list[Event]:
    """Return the first rank's computations of attention."""
    return [x for x in outcome.trace.events if x.kind == "compute" and x.rank == 0 and x.area]


def steps(outcome: Outcome) -> list[float]:
    """Return the milliseconds from each beginning of a computation of attention to the next."""
    starts = [x.start for x in computes(outcome)]
    return [1e3 * (b - a) for a, b in pairwise([*starts, outcome.seconds])]


def paper(mini: bool = False) -> Paper:
    """Return the README's times of steps."""
    layout = Layout.zigzag(TOKENS, RANKS)

    def run(name: str, **options: torch.dtype) -> Outcome:
        return attention(name, layout, CLUSTER, SHAPE, False, **options)

    ring, token, wide = (
        run("ring"),
        run("token_ring", partial_dtype=torch.bfloat16),
        run("token_ring"),
    )
    hop, own = statistics.median(steps(ring)[:-1]), steps(token)
    points = (
        Point("Ring, a round", "ms", hop, 7.6, SOURCE, fitted=True),
        Point("TokenRing, steps 0 and 1: queries travel", "ms", sum(own[:2]) / 2, 3.5, SOURCE),
        Point("TokenRing, step 2: results travel too", "ms", own[2], 4.6, SOURCE),
        Point("Ring's round over TokenRing's step 2", "×", hop / own[2], 7.6 / 4.6,
              SOURCE),
        Point("Ring's whole call over TokenRing's", "×", ring.seconds / token.seconds),
        Point("the same with partials in fp32, our default", "×", ring.seconds / wide.seconds),
    )  # fmt: skip
    return Paper("token_ring", "[TokenRing](https://github.com/ACA-Lab-SJTU/token-ring)", points)
