"""AllGather attention: the keys and values that a rank needs, all at once.

The context parallelism of "The Llama 3 Herd of Models" (2024), section 3.3.2, and the softmax half
of LASP-2H (Sun et al., "LASP-2", 2025, section 3.3). A rank receives only the rows that its queries
see, straight from their owners. All exchanges are posted first. A rank computes with its own keys,
and then with those of each exchange when they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from seqpar.softmax.keys.plan import Distances
from seqpar.softmax.keys.strategy import KeyStrategy
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import register


@dataclass(frozen=True)
class AllGather(KeyStrategy):
    """Keys and values are sent to all ranks that need them, at once."""

    name = "all_gather"

    def ahead(self, ranks: int) -> int:
        return ranks

    def distances(self, ranks: int) -> Distances:
        """Return how far away a rank's peers are in each exchange, so that compute hides it.

        The exchanges are of 1, 2, 4, … ranks' keys, and at the end of …, 4, 2, 1. So the first
        one's arrive, and the last one's gradients return, while a rank computes with its own;
        between them, the compute with the keys of n ranks hides an exchange with 2n.
        """
        rising: list[int] = []
        middle = ranks - 1
        while middle >= 2 << len(rising):
            rising.append(1 << len(rising))
            middle -= 2 * rising[-1]
        sizes = [*rising, middle, *reversed(rising)]
        if rising and 2 * middle <= rising[-1]:  # too few for an exchange of their own
            sizes = [*rising[:-1], rising[-1] + middle, *reversed(rising)]
        edges = accumulate(sizes, initial=1)
        return [range(first, stop) for first, stop in pairwise(edges) if stop > first]


@register
class AllGatherAttention(Attention):
    """Softmax attention whose keys and values travel at once.

    That is in about 2·log₂ P exchanges, all posted before the compute over a rank's own keys. In
    backward this compute is cut in two, of which one half hides the first keys and the other the
    last gradients. See `Attention` for the call, which all strategies share.

    Bytes sent by rank r, with n(p, r) the key rows of r that the queries of p see, S = B·Hkv·(D +
    Dv) and b the bytes of an element: forward Σ n(p, r)·S·b over the other ranks p; backward the
    same again, and Σ n(r, p)·S·4 (8 for fp64), since the fp32 contributions to dk and dv go to the
    rows' owner, which sums them in the order of the exchanges. `traffic` says how many that is.
    Messages: one to each peer of keys with values, and in backward also one of their gradients.

    With `message_dtype=torch.int8` keys and values travel in 8 bits, B·Hkv·(D + Dv + 8) bytes for a
    row, and results err by about 0.3% (docs/internals/numerics.md). With `deterministic="ranks"`
    the rows of tiles that ranks share travel too, and gradients of keys level by level of a tree.

    Memory: all keys and values that this rank's queries see, where Ring holds two blocks of them;
    in backward fp32 gradients of those of two exchanges, and what comes for this rank's. In return
    there are fewer waits and larger kernels.

    "The Llama 3 Herd of Models" (2024), section 3.3.2; Sun et al., "LASP-2" (2025), section 3.3.
    """

    strategy = AllGather
