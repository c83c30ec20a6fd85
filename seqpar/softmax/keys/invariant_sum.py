"""Sum what the tiles of a document contribute to its keys, in an order that no layout changes.

The sum is over a binary tree of the tiles' numbers: that of tiles 2i and 2i + 1 first, then of two
such pairs, and so on. A tile that contributes nothing is left out. So a rank can sum any subtree
whose tiles it has, and the owner of the keys the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class SumBlock(NamedTuple):
    """Rows `start` … of a sum, (n, …); all others are 0. Those who sum it may overwrite it."""

    start: int
    rows: Tensor

    @property
    def stop(self) -> int:
        """The row behind the last."""
        return self.start + len(self.rows)


def tree_sum(contributions: Iterable[tuple[int, SumBlock]]) -> SumBlock:
    """Return the sum of blocks, at least one, each of a tile or of a whole subtree.

    They come ascending, each with the number of any of its tiles.
    """
    waiting = list[tuple[int, SumBlock]]()
    for number, block in contributions:
        while len(waiting) > 1 and _height(*waiting[-2:]) < _height(waiting[-1], (number, block)):
            _add_last(waiting)
        waiting.append((number, block))
        del block
    while len(waiting) > 1:
        _add_last(waiting)
    return waiting[0][1]


def _height(one: tuple[int, SumBlock], other: tuple[int, SumBlock]) -> int:
    """Return how high the least subtree is that has two tiles, or two disjoint subtrees."""
    return (one[0] ^ other[0]).bit_length()


def _add_last(waiting: list[tuple[int, SumBlock]]) -> None:
    """Replace the last two by their sum."""
    number, last = waiting.pop()
    waiting[-1] = number, _sum(waiting[-1][1], last)


def _sum(one: SumBlock, other: SumBlock) -> SumBlock:
    for into, block in ((other, one), (one, other)):
        if into.start <= block.start and block.stop <= into.stop:
            first = block.start - into.start
            into.rows[first : first + len(block.rows)] += block.rows
            return into
    start, stop = min(one.start, other.start), max(one.stop, other.stop)
    total = SumBlock(start, one.rows.new_zeros((stop - start, *one.rows.shape[1:])))
    for block in (one, other):
        first = block.start - start
        total.rows[first : first + len(block.rows)] += block.rows
    return total
