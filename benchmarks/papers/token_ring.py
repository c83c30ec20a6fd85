"""TokenRing: steps of its causal forward and of Ring's, on four A10 on PCIe."""

from __future__ import annotations

import statistics
from itertools import pairwise

import torch

from benchmarks.papers.virtual_time import Shape, attention
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
PCIE = Link(10e-6, MESSAGE / ROUND)
CLUSTER = Cluster("4x-a10", 1, RANKS, 0, A10, PCIE, PCIE, PCIE)


def computes(outcome: Outcome) -> list[Event]:
    """Return the first rank's computations of attention."""
    return [x for x in outcome.trace.events if x.kind == "compute" and x.rank == 0 and x.area]


def steps(outcome: Outcome) -> list[float]:
    """Return the milliseconds from each beginning of a computation of attention to the next."""
    starts = [x.start for x in computes(outcome)]
    return [1e3 * (b - a) for a, b in pairwise([*starts, outcome.seconds])]


def predict(mini: bool) -> dict[str, float]:
    """Return the README's times of steps."""
    layout = Layout.zigzag(TOKENS, RANKS)
    bf16, fp32 = ({"partial_dtype": x} for x in (torch.bfloat16, torch.float32))
    ring, token, wide = (
        attention(name, layout, CLUSTER, SHAPE, False, **options)
        for name, options in (("ring", {}), ("token_ring", bf16), ("token_ring", fp32))
    )
    hop, own = statistics.median(steps(ring)[:-1]), steps(token)
    return {
        "Ring, a round": hop,
        "TokenRing, steps 0 and 1: queries travel": sum(own[:2]) / 2,
        "TokenRing, step 2: results travel too": own[2],
        "Ring's round over TokenRing's step 2": hop / own[2],
        "Ring's whole call over TokenRing's": ring.seconds / token.seconds,
        "Ring's whole call over TokenRing's with fp32 partials": ring.seconds / wide.seconds,
    }
