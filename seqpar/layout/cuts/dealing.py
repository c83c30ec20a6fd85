"""Deal out the tokens of a pack, so that every rank gets the same number of tokens.

Each of P ranks gets n = ⌈T/P⌉ of T tokens, whatever the documents are. If T < P·n, fewer than P
tokens are missing at the end of the pack.

Tokens are dealt in *rounds*. In a round, each rank in turn gets one *part*: a range of consecutive
tokens. The parts of one round have the same size, and the parts of the last round may be smaller
than those of earlier rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import CuSeqlens, Ints, as_bool, as_int, as_ranks, parse_cu_seqlens


class RowPlaces(NamedTuple):
    """Indices of the pack, from 0 to T, described by how many tokens are dealt before each."""

    dealt: Ints  # number of tokens that each rank got in earlier rounds
    offset: Ints  # number of tokens of this round that come before the index
    part: Ints  # number of tokens that each rank gets in this round

    def dealt_to(self, rank: int | Ints) -> Ints:
        """Count the tokens that a rank gets before the index."""
        in_round = np.maximum(self.offset - rank * self.part, 0)
        return self.dealt + np.minimum(in_round, self.part)  # np.clip takes several times as long

    def dealt_below(self, rank: int | Ints) -> Ints:
        """Count the tokens that ranks 0 … `rank` − 1 together get before the index."""
        return self.dealt * rank + np.minimum(self.offset, rank * self.part)

    def take(self, chosen: Ints) -> RowPlaces:
        return RowPlaces(*(values[chosen] for values in self))

    @property
    def turn(self) -> Ints:
        """The rank that gets the token at the index.

        Lower ranks already have their part of the round.
        """
        return self.offset // self.part


class Deal:
    """T tokens dealt to P ranks: `singles` per rank one by one, then parts of `part` tokens.

    All counts are closed forms, without an entry per round or document.
    """

    def __init__(self, tokens: int, ranks: int, part: int, singles: int = 0) -> None:
        self.ranks = ranks
        self.per_rank = -(-tokens // ranks)
        singles = min(singles, self.per_rank)
        rounds, rest = divmod(self.per_rank - singles, part)
        # There are three kinds of rounds: of single tokens, of whole parts, and of the rest. For
        # each kind: the number of tokens that a rank got before, and the size of a part. If the
        # rest is 0, the last kind has no tokens, and the size of its parts does not matter.
        self._begin = np.array([0, singles, singles + rounds * part])
        self._part = np.array([1, part, max(rest, 1)])
        # The number of the first part of each kind; parts are counted through all rounds.
        self._first_number = np.array([0, singles, singles + rounds]) * ranks

    def place(self, row: Ints) -> RowPlaces:
        """Describe indices of the pack, each from 0 to T."""
        kind = np.searchsorted(self._begin[1:] * self.ranks, row, side="right")
        begin, part = self._begin[kind], self._part[kind]
        rounds, offset = np.divmod(row - begin * self.ranks, part * self.ranks)
        return RowPlaces(begin + rounds * part, offset, part)

    def edge(self, number: Ints) -> Ints:
        """Return the index of the pack at which each part begins. Rank n mod P gets part n."""
        kind = np.searchsorted(self._first_number[1:], number, side="right")
        begin = self._begin[kind] * self.ranks
        return begin + (number - self._first_number[kind]) * self._part[kind]


def padded(
    cu_seqlens: CuSeqlens, ranks: int, equal: bool, multiple_of: int
) -> tuple[Ints, int, int]:
    """Check a layout's arguments; return cu_seqlens, the number of ranks and the tokens of padding.

    With `equal`, cu_seqlens has an additional last document: the padding.
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
