"""Ring attention: queries stay on their ranks, and keys and values are sent in steps.

In step s, rank r computes with the keys of rank r − s, while the keys of step s + 1 arrive. The
loop `ring` of docs/internals/in_300_lines.md shows the idea, but it computes only after the keys
have arrived. In the paper, each rank passes keys on to the next rank. Here, the rank that holds the
keys sends them directly, and only to ranks that need them. The code is in `seqpar/softmax/keys/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.softmax.keys.key_plan import Distances
from seqpar.softmax.keys.key_strategy import KeyStrategy
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import register


@dataclass(frozen=True)
class Ring(KeyStrategy):
    """The strategy in which a rank sends its keys and values to one rank in each step."""

    name = "ring"

    def distances(self, ranks: int) -> Distances:
        return [[step] for step in range(1, ranks)]

    def ahead(self, ranks: int) -> int:
        return 1


@register
class RingAttention(Attention):
    """Softmax attention in which queries stay, and keys and values are sent in P − 1 steps.

    The messages of a step are posted before a computation, so that they are sent while the rank
    computes: the computation *hides* them. In backward, the computation with a rank's own keys is
    cut into two halves. The first half hides the arrival of the first keys, and the second half
    hides the return of the last gradients. Each rank returns its contributions to dk and dv
    directly to the rank that holds the keys. That rank adds the contributions in fp32 in the order
    of the steps. See `Attention` for the call, which all strategies share.

    Options:

    * `message_dtype`: with `torch.int8` or `torch.float8_e4m3fn`, keys and values are sent in 8
      bits, with B·Hkv·(D + Dv + 8) bytes per row. The error of results is about 0.3% with int8 and
      1.5% with e4m3. For rows with outliers, e4m3 is better than int8 (docs/internals/numerics.md).
      With None, the default, keys and values are sent in the dtypes that they have.
    * `gradient_dtype`: with `torch.bfloat16`, all contributions to dk and dv are sent in 2 bytes
      per element. The error of an element is then at most 1/256 of the sum of the absolute values
      of other ranks' contributions.
    * `deterministic="ranks"`: queries are computed in tiles, which are ranges of queries of a
      document. If several ranks hold rows of a tile, all rows of the tile are sent to one of these
      ranks. The gradients of a key are added in the order of a binary tree, which does not depend
      on the number of ranks.

    Bytes sent by rank r. n(p, r) is the number of key rows of r to which queries of p attend, and S
    is B·Hkv·(D + Dv). b is the number of bytes of an element of k, and w is the number of bytes of
    an element of a contribution. Sums are over the other ranks p. `traffic` returns these numbers.

    * forward: Σ n(p, r)·S·b;
    * backward: Σ n(p, r)·S·b again, and Σ n(r, p)·S·w.

    If one call of FlashAttention computed the contribution to the keys of a rank, w is equal to b.
    In all other cases, w is 4 (8 for fp64). On contiguous and zigzag layouts without a window, one
    call computes each contribution. The bits of results do not depend on w.

    Messages: for each group of heads, one message with keys and values to each other rank, and in
    backward a second message with the gradients of keys and values. A rank with many rows computes
    its heads in g groups, one after another:

        g = max(rows · L / N / 4,096, rows / 16,384)

    Here rows is B·T for the rank with the most key rows T, and N is the number of tokens. L is the
    mean, over all tokens, of the length of the token's document. With a window, the length of a
    document counts as at most twice the width of the window. g is at least 1 and at most Hkv.

    Memory for a group of heads: a rank holds the keys and values of two other ranks, and a packed
    copy of its own keys and values. Forward also holds the partial result of the group. Backward
    also holds the group's fp32 gradients of this rank's tokens, and the gradients of the keys of
    three ranks: gradients that are being computed, gradients that are being sent, and gradients
    that arrive. The memory of a message is held until the rank has waited for the message. The
    results of all heads are held in addition.

    The method is from Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for
    Near-Infinite Context" (2023), section 3.
    """

    strategy = Ring
