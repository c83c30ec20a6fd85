"""Ring attention: queries stay, keys and values travel in steps.

To the loop `ring` of docs/internals/in_300_lines.md, this strategy adds that the messages of one
step travel while the step before is computed.

At step s, a rank computes with the keys of the rank s places before it while the keys of step s + 1
arrive. Unlike in the paper, owners send rows directly and only to ranks that need them.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.softmax.keys.key_plan import Distances
from seqpar.softmax.keys.key_strategy import KeyStrategy
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import register


@dataclass(frozen=True)
class Ring(KeyStrategy):
    """In each step, the keys and values of one rank travel."""

    name = "ring"

    def distances(self, ranks: int) -> Distances:
        return [[step] for step in range(1, ranks)]

    def ahead(self, ranks: int) -> int:
        return 1


@register
class RingAttention(Attention):
    """Softmax attention whose keys and values travel in P − 1 steps.

    The messages of a step are posted before the compute that hides them. In backward, the compute
    with the rank's own keys is cut into two halves: the first hides the arrival of the first keys,
    and the second hides the return of the last gradients. Each rank returns its contributions to
    dk and dv directly to the owner of the rows, which adds them in fp32 in the order of the steps.
    See `Attention` for the call, which all strategies share.

    Bytes sent by rank r, with n(p, r) the rows of r that queries of p attend to, S = B·Hkv·(D +
    Dv), b the bytes of an element, w those of a contribution, and sums over the other ranks p.
    `traffic` returns these numbers.

    * forward: Σ n(p, r)·S·b;
    * backward: the same again, and Σ n(r, p)·S·w.

    w is b if one call of FlashAttention returned the contribution to the keys of one rank, and
    otherwise 4 (8 for fp64). On contiguous and zigzag layouts without a window, one call returns
    each contribution. The bits of results do not depend on w.

    Messages: one per peer and group of heads with keys and values, and in backward another one with
    their gradients. Ranks with many rows compute their heads in g groups, one after another. With
    one document there is one group per 4,096 of the B·T key rows of the longest rank. Short
    documents and windows have less work for these rows, so the number of rows is multiplied by L/N.
    N is the number of tokens, and L is the length of a token's document, on average over all
    tokens. A window limits the length of a document to twice the window's width. There is at least
    one group per 16,384 rows, and there are at most Hkv groups.

    With `message_dtype=torch.int8` or `torch.float8_e4m3fn`, keys and values travel in 8 bits,
    B·Hkv·(D + Dv + 8) bytes per row. The error of results is about 0.3% with int8 and 1.5% with
    e4m3, which is better for rows with outliers (docs/internals/numerics.md). With
    `deterministic="ranks"`, rows of tiles that ranks share also travel, and gradients of keys are
    added level by level along a tree.

    With `gradient_dtype=torch.bfloat16`, all contributions travel in 2 bytes. The error of an
    element is then at most 1/256 of the sum of the absolute values of other ranks' contributions.

    Memory of a group of heads: two blocks of a peer's keys and values, and this rank's keys and
    values packed. Forward adds the partial of the group. Backward adds the group's fp32 gradients
    of this rank's tokens, and three blocks of gradients: computed, leaving and arriving. Messages
    count until they have been waited for. The results of all heads are held in addition.

    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context"
    (2023), section 3.
    """

    strategy = Ring
