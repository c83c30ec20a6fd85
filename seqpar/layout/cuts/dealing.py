"""Deal the tokens of a packed batch to ranks like cards, so that all ranks get equal numbers of
tokens.

In each round, each rank gets a range of consecutive tokens. All ranges of a round have the same
size, except in the last round. Each of P ranks gets ⌈T/P⌉ of T tokens, regardless of the documents.
If T is not a multiple of P, the last ranks together get up to P − 1 tokens fewer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import CuSeqlens, Ints, as_bool, as_int, as_ranks, parse_cu_seqlens


class DealtBefore(NamedTuple):
    """For each of some indices of the pack, how many tokens the ranks get before this index."""

    dealt: Ints  # the number of tokens that each rank got in earlier rounds
    offset: Ints  # the number of tokens of this round before the index
    part: Ints  # the number of tokens that each rank gets in this round

    def dealt_to(self, rank: int | Ints) -> Ints:
        """Return how many tokens one rank gets before each index."""
        in_round = np.maximum(self.offset - rank * self.part, 0)
        # np.clip would take several times as long
        return self.dealt + np.minimum(in_round, self.part)

    def dealt_below(self, rank: int | Ints) -> Ints:
        """Return how many tokens the ranks 0 … `rank` − 1 together get before each index."""
        return self.dealt * rank + np.minimum(self.offset, rank * self.part)

    def take(self, chosen: Ints) -> DealtBefore:
        return DealtBefore(*(values[chosen] for values in self))

    @property
    def turn(self) -> Ints:
        """The rank that gets the token at each of the indices of the pack."""
        return self.offset // self.part


class Deal:
    """The rule by which the T tokens of a batch are dealt to P ranks like cards, in rounds.

    In each of the first `singles` rounds, each rank gets one token. In each later round, each rank
    gets `part` consecutive tokens. In the last round, ranks may get fewer tokens.
    """

    def __init__(self, tokens: int, ranks: int, part: int, singles: int = 0) -> None:
        self.ranks = ranks
        self.per_rank = -(-tokens // ranks)
        singles = min(singles, self.per_rank)
        rounds, rest = divmod(self.per_rank - singles, part)
        # There are three kinds of rounds: rounds of single tokens, then rounds of full parts, then
        # one round for the rest. For each kind, these are the number of tokens that a rank got
        # before, and the size of a part. If there is no rest, the last round has no tokens, and the
        # size of its parts has no effect.
        self._begin = np.array([0, singles, singles + rounds * part])
        self._part = np.array([1, part, max(rest, 1)])
        # The index of the first part of each kind. Parts are counted from the first round on.
        self._first_number = np.array([0, singles, singles + rounds]) * ranks

    def before(self, index: Ints) -> DealtBefore:
        """Return how many tokens the ranks get before some indices of the pack, from 0 to T."""
        kind = np.searchsorted(self._begin[1:] * self.ranks, index, side="right")
        begin, part = self._begin[kind], self._part[kind]
        rounds, offset = np.divmod(index - begin * self.ranks, part * self.ranks)
        return DealtBefore(begin + rounds * part, offset, part)

    def edge(self, number: Ints) -> Ints:
        """Return the index of the pack at which each part begins. Rank n mod P gets part n."""
        kind = np.searchsorted(self._first_number[1:], number, side="right")
        begin = self._begin[kind] * self.ranks
        return begin + (number - self._first_number[kind]) * self._part[kind]


def padded(
    cu_seqlens: CuSeqlens, ranks: int, equal: bool, multiple_of: int
) -> tuple[Ints, int, int]:
    """Check the arguments of a layout. Return cu_seqlens, the number of ranks, and the number of
    padding tokens.

    With `equal`, cu_seqlens ends with an additional document, which is the padding.
    """
    cu, ranks = parse_cu_seqlens(cu_seqlens), as_ranks("ranks", ranks)
    multiple_of = as_int("multiple_of", multiple_of, 1)
    if not as_bool("equal", equal):
        if multiple_of > 1:
            raise ValueError(f"multiple_of needs equal=True, got {multiple_of} without it")
        return cu, ranks, 0
    tokens = int(cu[-1])
    total = -(-tokens // (ranks * multiple_of)) * ranks * multiple_of
    if total - tokens >= 2**31:
        limit = "less than 2**31 tokens of padding"
        raise ValueError(f"multiple_of must leave {limit}, got {multiple_of}")
    return np.r_[cu, total], ranks, total - tokens
