"""Find the part of a cell that has a given number of pairs and costs the fewest bytes to move.

A cell is the attention of a span of query rows on one server (`cells.py`). A *rectangle* consists
of n query rows of a cell and w keys of the cell. If a rectangle is moved to another server, n rows
of queries and results, and w rows of keys and values, are sent. Let m = n·w be the number of pairs,
q the bytes of a row of queries and results, and k the bytes of a row of keys and values. For a
given m, the fewest bytes are sent if n·q = w·k: they are then 2·sqrt(m·q·k).

Under a causal mask, the best rectangles have the last queries and the first keys of a cell. The
mask can hide a corner of such a rectangle.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil, inf, sqrt
from typing import NamedTuple

from seqpar.balance.disaggregation.cells import Intervals, covered

ROUNDING_ERROR = 1e-9  # relative error of computed numbers of rows and keys


class Cell(NamedTuple):
    pairs: int  # number of visible (query, key) pairs
    document: int  # as in `Parts`
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int
    high: int
    rate: float  # the work of a pair

    def without(self, part: CellPart) -> list[Cell]:
        """Return what remains of this cell if a part of its attention is moved to another server,
        as a list of at most two cells. A cell is a span of query rows and a span of keys. The first
        cell has the query rows before the part. The second cell has the query rows of the part, and
        the keys after the keys of the part.
        """
        _, document, q_start, q_stop, k_start, k_stop, low, high, rate = self
        above = q_start, part.q_start, k_start, min(k_stop, part.q_start + high)
        beside = part.q_start, q_stop, part.k_stop, k_stop
        found = []
        for rows_and_keys in (above, beside):
            pairs = area(*rows_and_keys, low, high)
            if pairs > 0:
                found.append(Cell(pairs, document, *rows_and_keys, low, high, rate))
        return found


class CellPart(NamedTuple):
    """A part of a cell, with the query rows from `q_start` on and some of the keys. A cell is a
    span of query rows and a span of keys.
    """

    q_start: int  # the first row
    k_start: int  # the range of keys
    k_stop: int
    pairs: int  # number of visible pairs
    rows: float  # number of query rows that are sent with the part
    keys: float  # number of keys that are sent to the new server
    freed: float  # number of keys that the old server no longer receives


class Prices(NamedTuple):
    query: float  # bytes of a row of queries
    key: float  # bytes of a row of keys
    held: Intervals  # keys of the document that the new server holds, or receives anyway
    foreign: Intervals  # keys that the cell's current server receives only for this cell

    def keys(self, cell: Cell, rows: float, first: float, stop: float) -> tuple[float, float]:
        """Return two numbers of keys for moving a part of a cell to another server. The first
        number must be sent to the new server. The second number need not be sent to the old server
        any more.
        """
        freed = 0.0
        if self.foreign and rows >= cell.q_stop - cell.q_start:
            freed = covered(self.foreign, first, stop)
        return stop - first - covered(self.held, first, stop), freed

    def least(self, cell: Cell, pairs: float) -> float:
        """Return an estimate of the least number of bytes, per (query, key) pair, that moving a
        part with `pairs` pairs takes.
        """
        pairs = min(pairs, cell.pairs)
        held = sum(stop - start for start, stop in self.held)
        width = max(min(sqrt(pairs * self.query / self.key), cell.k_stop - cell.k_start), held)
        width = min(width, cell.k_stop - cell.k_start)
        keys = max(width - held, 0) - sum(stop - start for start, stop in self.foreign)
        return self.query / width + keys * self.key / pairs


def area(q0: int, q1: int, k0: int, k1: int, low: int, high: int) -> int:
    """Count the pairs (i, j) with low ≤ j − i ≤ high, for i from q0 to q1 − 1 and j from k0 to k1 −
    1.
    """
    w = k1 - k0
    return _below(q0, q1, w, high + 1 - k0) - _below(q0, q1, w, low - k0)


def _below(q0: int, q1: int, w: int, c: int) -> int:
    """Sum clip(i + c, 0, w) over i from q0 to q1 − 1."""
    first, last = q0 + c, q1 + c
    if first >= w:
        return (last - first) * w
    if last <= 0:
        return 0
    first = max(first, 0)
    if last <= w:
        return (last * (last - 1) - first * (first - 1)) // 2
    return (w * (w - 1) - first * (first - 1)) // 2 + w * (last - w)


def cut(cell: Cell, pairs: float, prices: Prices, tile: int, at_least: bool) -> CellPart | None:
    """Return the part of a cell with about `pairs` (query, key) pairs that costs the fewest bytes
    to move. Return None if there is no such part.

    The part has at most `pairs` pairs or, with `at_least`, at least `pairs` pairs. Because of
    rounding, the number can miss this limit by up to half a pair for each row in which the mask
    hides some keys. The number of rows before the part is a multiple of `tile`, the number of rows
    that a kernel computes together.
    """
    rows, width = cell.q_stop - cell.q_start, cell.k_stop - cell.k_start
    if pairs >= cell.pairs:
        return _part(cell, rows, width, prices)
    if cell.low > cell.k_start - cell.q_stop + 1:  # some rows do not attend to the first keys
        return _last_rows(cell, pairs, prices, tile, at_least)
    # The number of keys to which the last row could attend; inf if all rows attend to all keys.
    bottom = inf if cell.pairs == rows * width else cell.q_stop + cell.high - cell.k_start
    best, least = float(rows), inf
    for w in _widths(cell, pairs, bottom, prices):
        n = _rows_over(w, bottom, pairs)
        if rows - tile / 2 < n < rows * (1 + ROUNDING_ERROR):
            n = rows  # the rounding below can give all rows, and moving all rows frees many keys
        if n <= rows:
            keys, freed = prices.keys(cell, n, cell.k_start, cell.k_start + w)
            nbytes = n * prices.query + (keys - freed) * prices.key
            if nbytes < least:
                best, least = n, nbytes
    before = min(int((rows - best) / tile + 0.5), (rows - 1) // tile) * tile
    w = _width_of(rows - before, bottom, pairs)
    if at_least and w > width and before:
        before -= tile
        w = _width_of(rows - before, bottom, pairs)
    w = min(w, width)
    tiles = ceil(w / tile - ROUNDING_ERROR) if at_least else int(w / tile + ROUNDING_ERROR)
    return _part(cell, rows - before, min(tiles * tile, width), prices) if tiles else None


def _last_rows(
    cell: Cell, pairs: float, prices: Prices, tile: int, at_least: bool
) -> CellPart | None:
    """Return the part with about `pairs` pairs that consists of the last rows of the cell, with all
    keys of these rows.
    """
    # With a sliding window, rows attend to different keys, so a part with fewer keys would save few
    # bytes.
    rows, width = cell.q_stop - cell.q_start, cell.k_stop - cell.k_start

    def part(before: int) -> CellPart:
        return _part(cell, rows - before * tile, width, prices)

    # The largest number of tiles before the part with which the part still has `pairs` pairs.
    tiles = range(1, (rows - 1) // tile + 1)
    before = bisect_left(tiles, True, key=lambda n: part(n).pairs < pairs)
    found = part(before)
    if at_least or found.pairs <= pairs:
        return found
    return part(before + 1) if (before + 1) * tile < rows else None


def _part(cell: Cell, rows: int, width: int, prices: Prices) -> CellPart:
    first, stop = cell.q_stop - rows, cell.k_start + width
    start = max(cell.k_start, first + cell.low)
    pairs = area(first, cell.q_stop, start, stop, cell.low, cell.high)
    return CellPart(first, start, stop, pairs, rows, *prices.keys(cell, rows, start, stop))


def _rows_over(width: float, bottom: float, pairs: float) -> float:
    """Return how many of the last rows together have `pairs` pairs with the first `width` keys. The
    result is inf if all rows together have fewer pairs.
    """
    full = max(bottom - width, 0.0)  # rows that attend to all `width` keys
    if pairs <= full * width:
        return pairs / width
    seen, rest = min(width, bottom), pairs - full * width
    square = seen * seen - 2 * rest
    return full + seen - sqrt(max(square, 0.0)) if square >= -ROUNDING_ERROR * seen * seen else inf


def _width_of(rows: float, bottom: float, pairs: float) -> float:
    """Return how many of the first keys together have `pairs` pairs with the last `rows` rows. The
    result is inf if all keys together have fewer pairs.
    """
    top = bottom - rows  # keys that the first of the rows attends to
    if pairs <= rows * top:
        return pairs / rows
    # rows·w − (w − top)²/2 = pairs
    square = bottom * bottom - top * top - 2 * pairs
    return bottom - sqrt(square) if square >= 0 else inf


def _widths(cell: Cell, pairs: float, bottom: float, prices: Prices) -> list[float]:
    """Return numbers of keys to try for a part with `pairs` pairs. With one of these numbers, the
    fewest bytes are sent.
    """
    rows, width = cell.q_stop - cell.q_start, cell.k_stop - cell.k_start
    ratio = prices.query / prices.key
    # Candidates: all keys of the cell; the cheapest full rectangle; the width for all rows.
    found = [float(width), sqrt(pairs * ratio), _width_of(rows, bottom, pairs)]
    if bottom < inf:
        # Candidate: the largest width at which the mask hides no corner.
        square = bottom * bottom - 4 * pairs
        if square >= 0:  # (bottom − w)·w = pairs
            found.append((bottom + sqrt(square)) / 2)
        # Candidate: the width at which the mask hides a corner, and rows and keys cost the same. It
        # solves n·w − (n + w − bottom)²/2 = pairs with bottom − n = ratio·(bottom − w).
        square = bottom * bottom - ((bottom / ratio) ** 2 + 2 * pairs) / (1 + 1 / ratio**2)
        if square >= 0:
            found.append(bottom - sqrt(square) / ratio)
    # Candidates: the ends of key ranges that the new server holds.
    found += [stop - cell.k_start for _, stop in prices.held]
    return [w for w in found if 0 < w <= width]
