"""TokenRing attention: keys and values stay, queries travel, and their results return.

To the loop `token_ring` of docs/internals/in_300_lines.md, this strategy adds a backward pass, and
results that return while the next queries are computed.

At step s, rank r computes for the queries of rank r − s. Meanwhile the queries of the next step
arrive, and the previous results leave, in separate exchanges: otherwise results would leave a step
later. The paper has no backward. Here q, dout, lse and delta travel, dq returns, and dk and dv
stay. Half of a rank's own queries are computed at the end, while the last results return.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.module import Attention
from seqpar.softmax.queries.tile_strategy import TileStrategy
from seqpar.strategies.registry import register


@dataclass(frozen=True)
class TokenRing(TileStrategy):
    """Queries travel one way and their results the other way: all ranks are one row of a mesh."""

    name = "token_ring"

    def columns_of(self, call: ResolvedCall) -> int:
        return call.ranks


@register
class TokenRingAttention(Attention):
    """Softmax attention whose queries travel in P − 1 steps, while keys and values stay.

    Results (out, lse) return in the other direction at the same time. Keys, values and their
    gradients stay. The rank of the queries merges each partial once, in fp32, in the order of the
    steps. See `Attention` for the call, which all strategies share.

    Args:
        gradient_dtype: the dtype of contributions to dq, which travel in backward: None, the
            default, is q's dtype for contributions that one call of FlashAttention returned, and
            otherwise the accumulator's; torch.bfloat16 takes 2 bytes. The error of an element is
            then at most 1/256 of the sum of the absolute values of other ranks' contributions.
        partial_dtype: the dtype of travelling partial outputs. lse always travels in the
            accumulator's dtype.

            * None, the default, without additional error: q's dtype for results that one call of
              FlashAttention returned, and otherwise the accumulator's, fp32 (fp64 for fp64).
            * torch.bfloat16 with bf16 inputs: each partial is rounded once more, to the dtype of
              the result. The RMS error of out is at most √2 times that of one device. Measured,
              with 2 to 16 ranks and 1,024 tokens: 1.08 to 1.24 times under a causal mask, 1.23 to
              1.40 without, and at most 1.02 for the gradients. With fp32 inputs, the error of out
              is about 3,000 times that of one device.
            * torch.int8 or torch.float8_e4m3fn: Dv + 4 bytes per row and head; the error of out is
              about 0.2% with int8 (docs/internals/numerics.md).

    Bytes sent by rank r, with m(r, p) the query rows of r that attend to a key of p, b the bytes of
    an element of q, e = 4 (8 for fp64), and sums over the other ranks p. w is the bytes of an
    element of a partial output, and d those of a contribution to dq. If no dtype is given, both are
    b for results that one call of FlashAttention returned, and otherwise e. On contiguous and
    zigzag layouts without a window, one call returns each result.

    * forward: queries Σ m(r, p)·B·Hq·D·b, results Σ m(p, r)·B·Hq·(Dv·w + e);
    * backward: queries Σ m(r, p)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient), results Σ m(p,
      r)·B·Hq·D·d.

    Messages: one per peer for travelling rows, and one for their results. If the rows are one
    contiguous range, backward sends q, dout and the statistics separately, without a copy. Ranks
    with many rows send their heads in g groups, and the compute of one group hides the messages of
    the next. The number of groups is as in `RingAttention`, but for query rows instead of key rows.

    Memory in addition to inputs and results, in bytes, for T local rows that all attend to keys of
    every rank: two blocks of a peer's queries, one more of leaving queries if they are copied (c =
    1, otherwise 0), and three blocks of results: one leaves, one returns, and one is computed or
    merged. Only the first terms grow with the rows.

    * forward: B·T·Hq·(4·Dv + 8 + ((2 + c)·D·b + 3·(Dv·w + 4) + 8)/g);
    * backward: B·T·Hq·(4·D + 16 + ((2 + c)·((D + Dv)·b + 8) + 3·D·d)/g), and dk and dv in fp32.

    TokenRing is faster than Ring if Hkv = Hq and queries and results have separate links that are
    free at the same time, as on a full mesh, but not on a host with one NIC. Bytes per token in
    each direction, with D = Dv and 2-byte elements:

    * forward: Ring 4·Hkv·D and 0, TokenRing 2·Hq·D and Hq·(w·D + 4). With Hq = Hkv, a link carries
      half of Ring's bytes if w = 2, and the same bytes if w = 4.
    * backward: Ring 4·Hkv·D and 2·d·Hkv·D, TokenRing Hq·(4·D + 8) and d·Hq·D.

    With GQA, Hq ≥ 2·Hkv, Ring sends the same bytes or fewer: use Ring.

    Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via
    Bidirectional Communication" (2024), section 3.
    """

    strategy = TokenRing
