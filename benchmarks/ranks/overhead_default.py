"""Measure the host's work in a call on the default path of an H200, with FlashAttention-4.

The contenders, the setting and the figures are those of `overhead.py`. A stand-in that allocates
its results takes the place of FlashAttention-4.
"""

from __future__ import annotations

from functools import partial

from benchmarks import harness
from benchmarks.ranks import overhead

STRATEGIES = "ring", "all_gather"
BEFORE = "bee777e4"  # the last commit before blocks kept prepared calls of their kernels
ARGUMENTS = overhead.ARGUMENTS | {
    "--before": (BEFORE, "the older commit"),
    "--only": ([*STRATEGIES], None, STRATEGIES),
}

if __name__ == "__main__":
    measure = partial(overhead.measure, kernel="FlashAttention-4")
    harness.run("overhead-default", __doc__, ARGUMENTS, measure, canary_is="recorded")
