"""AllGather attention: the keys and values that a rank needs, all posted before compute.

To the loop `ring` of docs/internals/in_300_lines.md, this strategy adds that all messages are
posted at the start.
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
    """Keys and values travel to all ranks that need them, in exchanges of 1, 2, 4, … ranks."""

    name = "all_gather"

    def ahead(self, ranks: int) -> int:
        return ranks

    def distances(self, ranks: int) -> Distances:
        """Return the distances of the peers of each exchange, chosen so that compute hides them.

        Exchanges cover 1, 2, 4, … ranks at the start and …, 4, 2, 1 at the end. The first keys
        arrive, and the last gradients return, under compute with the rank's own keys. In between,
        compute with the keys of n ranks hides an exchange of 2n ranks.
        """
        rising: list[int] = []
        middle = ranks - 1
        while middle >= 2 << len(rising):
            rising.append(1 << len(rising))
            middle -= 2 * rising[-1]
        sizes = [*rising, middle, *reversed(rising)]
        if rising and 2 * middle <= rising[-1]:  # too few for a separate exchange
            sizes = [*rising[:-1], rising[-1] + middle, *reversed(rising)]
        edges = accumulate(sizes, initial=1)
        return [range(first, stop) for first, stop in pairwise(edges) if stop > first]


@register
class AllGatherAttention(Attention):
    """Softmax attention that posts all exchanges of keys and values before it computes.

    There are about 2·log₂ P exchanges. A rank computes with its own keys first, then with the keys
    of each exchange when they have arrived. See `Attention` for the call, which all strategies
    share.

    The bytes, the messages, the halves of backward, `message_dtype`, `gradient_dtype` and
    `deterministic="ranks"` are as in `RingAttention`; the owner of rows adds gradients in the order
    of the exchanges. Contributions to the keys of several ranks, which arrived in one exchange,
    always have w = 4 (8 for fp64).

    Memory of a group of heads: all keys and values that this rank's queries attend to, where Ring
    holds two blocks. Backward adds the group's fp32 gradients of this rank's tokens, fp32 gradients
    of the keys of two exchanges, and incoming gradients for this rank's rows. With packed documents
    on a GPU, a kernel call also reads a copy of the keys and values of an exchange. In forward,
    some of them are in the copy twice. In return for this memory, AllGather waits less often than
    Ring, and its kernels are larger.

    "The Llama 3 Herd of Models" (2024), section 3.3.2; Sun et al., "LASP-2" (2025), section 3.3.
    """

    strategy = AllGather
