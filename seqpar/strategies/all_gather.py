"""AllGather attention: all exchanges of keys and values are posted before the computation.

As in Ring, queries stay on their ranks, and keys and values are sent. The loop `ring` of
docs/internals/in_300_lines.md shows the idea. Code that Ring and AllGather share is in
`seqpar/softmax/keys/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from seqpar.softmax.keys.key_plan import Distances
from seqpar.softmax.keys.key_strategy import KeyStrategy
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import register


@dataclass(frozen=True)
class AllGather(KeyStrategy):
    """The strategy in which a rank sends its keys and values to several ranks in each step."""

    name = "all_gather"

    def ahead(self, ranks: int) -> int:
        return ranks

    def distances(self, ranks: int) -> Distances:
        """Return the distances of each step. With the distance d, rank r receives keys of rank r −
        d.

        In the first steps, a rank receives keys from 1, 2, 4, … ranks. In the last steps, it
        receives keys from …, 4, 2, 1 ranks. While a rank computes with the keys of n ranks, it
        therefore receives the keys of at most 2n ranks.
        """
        rising: list[int] = []
        middle = ranks - 1
        while middle >= 2 << len(rising):
            rising.append(1 << len(rising))
            middle -= 2 * rising[-1]
        sizes = [*rising, middle, *reversed(rising)]
        if rising and 2 * middle <= rising[-1]:  # too few ranks for a step of their own
            sizes = [*rising[:-1], rising[-1] + middle, *reversed(rising)]
        edges = accumulate(sizes, initial=1)
        return [range(first, stop) for first, stop in pairwise(edges) if stop > first]


@register
class AllGatherAttention(Attention):
    """Softmax attention that posts all exchanges of keys and values before it computes.

    A rank first computes with its own keys. It then computes with the keys of each exchange after
    they have arrived. There are about 2·log₂ P exchanges. See `Attention` for the call, which all
    strategies share.

    The options `message_dtype`, `gradient_dtype` and `deterministic="ranks"` are as in
    `RingAttention`. AllGather sends the same bytes and messages as `RingAttention`, and also
    computes a rank's own keys in two halves in backward. There are two differences:

    * The rank that holds the keys adds gradients in the order of the exchanges.
    * If the keys of several ranks arrived in one exchange, contributions to the gradients of these
      keys are sent in the accumulator's dtype. In the formulas of `RingAttention`, w is 4 (8 for
      fp64) for these contributions.

    Memory for a group of heads: a rank holds all keys and values to which its queries attend. In
    Ring, a rank holds the keys and values of two ranks. In backward, a rank also holds fp32
    gradients of its own tokens, fp32 gradients of the keys of two exchanges, and the gradients that
    arrive for its own keys. On a GPU with packed documents, a kernel call also reads a copy of the
    keys and values of an exchange. In forward, this copy may contain some keys and values twice.
    AllGather needs more memory than Ring, but waits less often and starts larger kernels.

    The method is from "The Llama 3 Herd of Models" (2024), section 3.3.2, and Sun et al., "LASP-2"
    (2025), section 3.3.
    """

    strategy = AllGather
