"""TokenRing attention: keys and values stay on their ranks. Queries are sent, and results return.

In step s, rank r computes attention of the queries of rank r − s over its own keys. During this
computation, the queries of the next step arrive, and the results of the preceding step are sent
back. The loop `token_ring` of docs/internals/in_300_lines.md shows the idea.

The paper has no backward. In our backward, a rank sends q, dout, lse and delta to the other ranks,
which send dq back. dk and dv stay on their ranks. A rank leaves half of the work with its own
queries for the end, so that this work hides the return of the last results.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.module import Attention
from seqpar.softmax.queries.tile_strategy import TileStrategy
from seqpar.strategies.registry import register


@dataclass(frozen=True)
class TokenRing(TileStrategy):
    """The strategy that sends queries in one direction and results in the other direction.

    It is the strategy of `Mesh` on a mesh with one row.
    """

    name = "token_ring"

    def columns_of(self, call: ResolvedCall) -> int:
        return call.ranks


@register
class TokenRingAttention(Attention):
    """Softmax attention in which keys and values stay, and queries are sent in P − 1 steps.

    While queries are sent, results (out, lse) are sent back in the other direction. The rank that
    holds the queries merges each partial result once, in fp32, in the order of the steps. In
    backward, dq returns in the same way. See `Attention` for the call, which all strategies share.

    Args:
        gradient_dtype: the dtype in which contributions to dq return. With None, the default, it is
            q's dtype for contributions that one call of FlashAttention computed, and the
            accumulator's dtype for all others. With torch.bfloat16, contributions have 2 bytes per
            element. The error of an element is then at most 1/256 of the sum of the absolute values
            of other ranks' contributions.
        partial_dtype: the dtype in which partial outputs return. lse always returns in the
            accumulator's dtype.

            * None, the default, adds no error. Results that one call of FlashAttention computed
              return in q's dtype. All other results return in the accumulator's dtype, which is
              fp32 (fp64 for fp64).
            * torch.bfloat16 with bf16 inputs rounds each partial output once more, to the dtype of
              the result. The RMS error of out is at most √2 times that of one device. With 2 to 16
              ranks and 1,024 tokens, the measured error of out was 1.08 to 1.24 times that of one
              device under a causal mask, and 1.23 to 1.40 times without a mask. The measured error
              of gradients was at most 1.02 times that of one device. With fp32 inputs, the error of
              out is about 3,000 times that of one device.
            * torch.int8 or torch.float8_e4m3fn takes Dv + 4 bytes per row and head. The error of
              out is about 0.2% with int8 (docs/internals/numerics.md).

    Bytes sent by rank r. m(r, p) is the number of query rows of r that attend to some key of p. b,
    w and d are the bytes of an element of q, of a partial output, and of a contribution to dq. e is
    4 (8 for fp64). f is 2e, or 3e if lse has a gradient. If no dtype is given, w and d are equal to
    b for results that one call of FlashAttention computed, and equal to e for all other results. On
    contiguous and zigzag layouts without a window, one call computes each result. Sums are over the
    other ranks p.

    * forward: queries Σ m(r, p)·B·Hq·D·b, results Σ m(p, r)·B·Hq·(Dv·w + e);
    * backward: queries Σ m(r, p)·B·Hq·((D + Dv)·b + f), results Σ m(p, r)·B·Hq·D·d.

    Messages: one message with queries and one message with results to each other rank. If the rows
    are a single contiguous range, backward sends q, dout and the statistics in separate messages,
    without a copy. Ranks with many rows send their heads in g groups, and the computation of one
    group hides the messages of the next group. g is computed as in `RingAttention`, with query rows
    in place of key rows.

    Memory in addition to inputs and results, in bytes, if T local rows all attend to keys of every
    rank. A rank holds two blocks of a peer's queries. If the queries that the rank sends are
    copied, the copy is a third block, and c is 1. If they are not copied, c is 0. A rank holds
    three blocks of results: one block is sent, one block returns, and one block is computed or
    merged. For many rows, g grows with the rows, so only the terms that are not divided by g grow.

    * forward: B·T·Hq·(4·Dv + 8 + ((2 + c)·D·b + 3·(Dv·w + 4) + 8)/g);
    * backward: B·T·Hq·(4·D + 16 + ((2 + c)·((D + Dv)·b + 8) + 3·D·d)/g), and dk and dv in fp32.

    TokenRing is faster than Ring if Hkv = Hq, and if queries and results have separate links that
    are free at the same time. A full mesh of links has such separate links. A host with one NIC
    does not. The table shows the bytes per token in each direction, with D = Dv and inputs with
    elements of 2 bytes:

    | | Ring, keys and values | Ring, gradients | TokenRing, queries | TokenRing, results |
    |---|---|---|---|---|
    | forward | 4·Hkv·D | 0 | 2·Hq·D | Hq·(w·D + 4) |
    | backward | 4·Hkv·D | 2·d·Hkv·D | Hq·(4·D + 8) | d·Hq·D |

    In forward with Hq = Hkv, a link carries half of Ring's bytes if w = 2, and the same bytes as in
    Ring if w = 4. With GQA and Hq ≥ 2·Hkv, Ring sends the same number of bytes or fewer: use Ring.

    The method is from Wang et al., "TokenRing: An Efficient Parallelism Framework for
    Infinite-Context LLMs via Bidirectional Communication" (2024), section 3.
    """

    strategy = TokenRing
