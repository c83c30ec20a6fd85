"""Ring attention: queries stay, keys and values travel.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023),
section 3; with the zigzag layout, work is even under a causal mask. At step s a rank computes with
the key rows of the rank s places before it, while those of step s + 1 arrive. Unlike in the paper
they come straight from their owner, and only the rows that its queries see: passed from rank to
rank, rows would go through ranks that have no use for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.softmax.keys.plan import Distances
from seqpar.softmax.keys.strategy import KeyStrategy
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import register


@dataclass(frozen=True)
class Ring(KeyStrategy):
    """Keys and values are sent, those of one rank in each step."""

    name = "ring"

    def distances(self, ranks: int) -> Distances:
        return [[step] for step in range(1, ranks)]

    def ahead(self, ranks: int) -> int:
        return 1


@register
class RingAttention(Attention):
    """Softmax attention whose keys and values travel, in P − 1 steps.

    Each step's messages are posted before the compute that they hide under; in backward the
    compute with the rank's own keys is cut in two, of which one half hides the first keys and the
    other the last gradients. See `Attention` for the call, which all strategies share.

    Bytes sent by rank r, with n(p, r) the key rows of r that the queries of p see, S = B·Hkv·(D +
    Dv) and b the bytes of an element: forward Σ n(p, r)·S·b over the other ranks p; backward the
    same again, and Σ n(r, p)·S·4 (8 for fp64), since each rank returns its fp32 contribution to dk
    and dv straight to the rows' owner, which sums them in the order of the steps. `traffic` says
    how many that is.

    Messages: one to each peer of keys with values, and in backward also one of their gradients.

    With `message_dtype=torch.int8` keys and values travel in 8 bits, B·Hkv·(D + Dv + 8) bytes for a
    row, and results err by about 0.3% (docs/internals/numerics.md). With `deterministic="ranks"`
    the rows of tiles that ranks share travel too, and gradients of keys level by level of a tree.

    Memory: this rank's tensors, two blocks of a peer's keys and values, and this rank's packed; in
    backward also three blocks of fp32 gradients: computed, leaving and coming.

    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context"
    (2023), section 3.
    """

    strategy = Ring
