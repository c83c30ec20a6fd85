"""TokenRing attention: keys and values stay, queries travel, and their results return.

Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via
Bidirectional Communication" (2024), section 3. At step s rank r computes for the queries of rank r
− s, while those of the next step arrive and the results of the step before leave for their owner,
the other way at the same time. The paper has no backward: here (q, dout, lse, delta) travel, dq
returns, dk and dv stay. Half of a rank's own queries are computed last, while the last results
return.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.module import Attention
from seqpar.softmax.queries.strategy import TileStrategy
from seqpar.strategies.registry import register


@dataclass(frozen=True)
class TokenRing(TileStrategy):
    """Queries travel one way, their results the other way: all ranks are one row."""

    name = "token_ring"

    def columns_of(self, call: ResolvedCall) -> int:
        return call.ranks


@register
class TokenRingAttention(Attention):
    """Softmax attention whose queries travel, in P − 1 steps, while keys and values stay.

    The results (out, lse) return the other way at the same time; keys and values, and their
    gradients, stay. Each partial is merged once, on the queries' rank, in fp32, in the order of the
    steps.

    `partial_dtype` is what partial outputs travel in: by default the accumulator's, fp32 (fp64 for
    fp64), which adds no error and takes twice the bytes of bf16. With torch.bfloat16 and bf16
    inputs each partial is rounded once more, to the result's dtype: the RMS error of out becomes at
    most √2 times that of one device; measured 1.08 to 1.24 times under a causal mask and 1.23 to
    1.40 without (P = 2 to 16 ranks, N = 1,024 tokens), at most 1.02 for the gradients. With fp32
    inputs the error of out becomes some 3,000 times that of one device. lse, and dq in backward,
    always travel in the accumulator's dtype. With torch.int8 a partial travels in 8 bits, Dv + 4
    bytes for a row and head, and out errs by about 0.2% (docs/internals/numerics.md).

    Bytes sent by rank r, with m(r, p) the query rows of r that see any key of p, b the bytes of an
    element of q, w those of a partial output, and e = 4 (8 for fp64). Sums are over the other ranks
    p:

    * forward: queries Σ m(r, p)·B·Hq·D·b, results Σ m(p, r)·B·Hq·(Dv·w + e);
    * backward: queries Σ m(r, p)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient), results
      Σ m(p, r)·B·Hq·D·e.

    Messages: what travels to a peer is one, and so are its results. Only of rows that are one range
    are q, dout and the statistics of backward sent apart, without a copy. Ranks with many rows send
    their heads in groups, each of which hides under the one before: g of them, one for each 4,096
    of the B·T rows of the longest rank, and at most Hkv.

    Memory beside inputs and results, in bytes, for T local rows of which all see keys of every
    rank: two blocks of a peer's queries, with one more of those that leave if they are copied (c =
    1, else 0), and three of results: one that leaves, one that returns, and one that is computed
    or merged. Only what stays grows with the rows.

    * forward: B·T·Hq·(4·Dv + 8 + ((2 + c)·D·b + 3·(Dv·w + 4) + 8)/g);
    * backward: B·T·Hq·(4·D + 16 + ((2 + c)·((D + Dv)·b + 8) + 12·D)/g), and dk and dv in fp32.

    It beats Ring with as many KV heads as query heads, where queries and results have separate
    links, both free at the same time, as on a full mesh: at step s queries go to rank r + s + 1 and
    results to rank r − s + 1. Where a host has one NIC, all that it sends shares the port, and
    nothing is gained. Bytes for each token in each direction, with D = Dv and 2-byte elements:
    Ring's forward sends 4·Hkv·D one way and nothing the other, TokenRing's 2·Hq·D and Hq·(w·D + 4);
    so for Hq = Hkv a link carries half of Ring's bytes with w = 2, and as much with w = 4. Ring's
    backward sends 4·Hkv·D one way and 8·Hkv·D the other, TokenRing's Hq·(4·D + 8) and 4·Hq·D. With
    GQA, Hq ≥ 2·Hkv, Ring sends less or as much; use Ring.

    Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via
    Bidirectional Communication" (2024), section 3.
    """

    strategy = TokenRing
