"""Parts of cells: their pairs, their bytes, and that no other part is much cheaper."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqpar.balance.disaggregation.cells import Unions, covered, union, without
from seqpar.balance.disaggregation.rectangles import Cell, Prices, area, cut

sides = st.integers(0, 40)


@given(sides, sides, sides, sides, st.integers(-60, 60), st.integers(0, 60))
def test_area_counts_pairs(q0, rows, k0, keys, low, width):
    q, k = np.arange(q0, q0 + rows)[:, None], np.arange(k0, k0 + keys)[None, :]
    seen = (k - q >= low) & (k - q <= low + width)
    assert area(q0, q0 + rows, k0, k0 + keys, low, low + width) == seen.sum()


def brute_bytes(cell, prices, rows, width):
    """Bytes of the last rows over the first keys, row by row and key by key."""
    keys = set(range(cell.k_start, cell.k_start + width))
    held = {i for a, b in prices.held for i in range(a, b)}
    freed = {i for a, b in prices.foreign for i in range(a, b)}
    gone = len(keys & freed) if rows == cell.q_stop - cell.q_start else 0
    return rows * prices.query + (len(keys - held) - gone) * prices.key


@st.composite
def cuts(draw):
    rows, above = draw(st.integers(1, 60)), draw(st.integers(0, 60))
    full, k_start = draw(st.booleans()), draw(st.integers(0, 5))
    q_start = k_start + above
    k_stop = q_start + rows if not full else k_start + draw(st.integers(1, 90))
    high = 200 if full else 0
    corners = q_start, q_start + rows, k_start, k_stop
    cell = Cell(area(*corners, -200, high), 0, *corners, -200, high, 1.0)
    held = draw(st.sampled_from([[], [(k_start, k_start + 20)], [(0, 9), (30, 50)]]))
    foreign = draw(st.sampled_from([[], [(0, 30)]]))
    prices = Prices(draw(st.sampled_from([1.0, 4.0, 16.0])), 4.0, held, foreign)
    return cell, prices, draw(st.integers(1, cell.pairs)), draw(st.sampled_from([1, 4, 16]))


@given(cuts(), st.booleans())
def test_a_part_is_what_was_asked_for(call, at_least):
    cell, prices, pairs, tile = call
    part = cut(cell, pairs, prices, tile, at_least)
    if part is None:  # less than a tile of rows and keys
        assert not at_least
        return
    rows, width = cell.q_stop - part.q_start, part.k_stop - cell.k_start
    assert part.pairs == area(part.q_start, cell.q_stop, cell.k_start, part.k_stop, -200, cell.high)
    # Areas are those of triangles, to which each row of a diagonal adds half a pair.
    assert part.pairs >= pairs if at_least else part.pairs <= pairs + rows / 2
    assert (part.q_start - cell.q_start) % tile == 0
    nbytes = part.rows * prices.query + (part.keys - part.freed) * prices.key
    assert nbytes == brute_bytes(cell, prices, rows, width)
    left = cell.without(part)
    assert sum(rest.pairs for rest in left) + part.pairs == cell.pairs


@given(cuts())
def test_no_other_part_is_much_cheaper(call):
    cell, prices, pairs, _ = call
    part = cut(cell, pairs, prices, 1, at_least=True)
    found = part.rows * prices.query + (part.keys - part.freed) * prices.key
    best = np.inf
    for rows in range(1, cell.q_stop - cell.q_start + 1):
        for width in range(1, cell.k_stop - cell.k_start + 1):
            corners = cell.q_stop - rows, cell.q_stop, cell.k_start, cell.k_start + width
            if area(*corners, cell.low, cell.high) >= pairs:
                best = min(best, brute_bytes(cell, prices, rows, width))
                break  # wider ones are not cheaper, but for keys that are held or freed
    # Rows are rounded to whole ones, and a row less takes so many keys more of each of the others.
    rounding = prices.key * (part.k_stop - part.k_start) / part.rows
    assert found <= 1.1 * max(best, 0) + 2 * (prices.query + prices.key) + rounding


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=8)


@given(ranges, ranges)
def test_intervals_are_sets_of_positions(first, second):
    first, second = ([(a, a + n) for a, n in x if n] for x in (first, second))
    positions = [{i for a, b in x for i in range(a, b)} for x in (first, second)]
    one, two = union(first), union(second)
    for found, expected in ((one, positions[0]), (without(one, two), positions[0] - positions[1])):
        assert [i for a, b in found for i in range(a, b)] == sorted(expected)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(one))
    assert covered(one, 5, 20) == len(positions[0] & set(range(5, 20)))


@given(st.lists(st.tuples(*(st.integers(0, 3),) * 2, st.integers(0, 20), st.integers(0, 9))))
def test_unions_are_sets_of_positions(rows):
    servers, documents, starts, lengths = np.array(rows, np.int64).reshape(-1, 4).T
    found = Unions(servers, documents, starts, starts + lengths)
    held = {(s, d, i) for s, d, a, n in rows for i in range(a, a + n)}
    for server in range(4):
        for document in range(4):
            mine = [i for a, b in found.of(server, document) for i in range(a, b)]
            assert mine == sorted(i for s, d, i in held if (s, d) == (server, document))
    assert found.sizes(4).tolist() == [sum(s == server for s, _, _ in held) for server in range(4)]
