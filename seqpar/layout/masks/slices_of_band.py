"""Find the query rows and key rows that form pairs in a band lo ≤ k_pos − q_pos ≤ hi."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import UNLIMITED, enumerated
from seqpar.layout.geometry import Holding

Bounds = tuple[Ints, Ints]


def clusters(q: Holding, band: int) -> tuple[Ints, Ints, Ints]:
    """Cut the rows of queries into clusters. Return each cluster's run, first row and row after the
    last row.

    A *run* is all tokens of a document on one rank. A *cluster* is a set of neighbouring query rows
    of a run that together attend to a range of keys without gaps. A run is therefore cut at each
    gap between its positions that is wider than `band`, the range of allowed distances.
    """
    new_run = q.documents[1:] != q.documents[:-1]
    begins_cluster = new_run | (q.starts[1:] - q.stops[:-1] >= band + 1)
    first = np.r_[0, np.flatnonzero(begins_cluster) + 1][: q.documents.size]
    last = np.r_[first[1:], q.documents.size][: first.size]
    return q.documents[first], q.offsets[first], q.offsets[last]


def cut_at_gaps(q: Holding, starts: Ints, stops: Ints, widths: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut ranges of query rows where the positions of neighbouring rows are far apart.

    Each range must lie within one document. A range is cut at gaps that are wider than its entry in
    `widths`. Returns three arrays with an entry for each piece of a range: the index of the range,
    the start of the piece, and the stop of the piece. An empty range has no piece.
    """
    # Ranges with a gap wider than their band are cut together, at all gaps that are wider than the
    # narrowest of their bands.
    gaps = q.starts[1:] - q.stops[:-1]
    widest = gaps[q.documents[1:] == q.documents[:-1]].max(initial=0)
    narrow = widths < widest
    _, first_rows, _ = clusters(q, int(widths[narrow].min(initial=widest)))
    first = np.searchsorted(first_rows, starts, side="right") - 1
    last = np.where(narrow, np.searchsorted(first_rows, stops, side="left") - 1, first)
    index, cluster = enumerated(first, np.where(stops > starts, last, first - 1))
    ends = np.r_[first_rows, q.tokens][cluster + 1]
    starts = np.maximum(starts[index], first_rows[cluster])
    return index, starts, np.where(narrow[index], np.minimum(stops[index], ends), stops[index])


def trim(
    q_starts: Ints, q_stops: Ints, k_starts: Ints, k_stops: Ints, lows: Ints, highs: Ints
) -> tuple[Ints, tuple[Ints, Ints, Ints, Ints]]:
    """Shrink rectangles to the positions that have pairs, and drop rectangles without pairs.

    Returns the indices of the remaining rectangles, and the remaining rectangles.
    """
    some = (q_stops > q_starts) & (k_stops > k_starts) & (lows <= highs)
    begins, ends = np.maximum(q_starts, k_starts - highs), np.minimum(q_stops, k_stops - lows)
    index = np.flatnonzero(some & (ends > begins))
    begins, ends = begins[index], ends[index]
    first = np.maximum(k_starts[index], begins + lows[index])
    return index, (begins, ends, first, np.minimum(k_stops[index], ends + highs[index]))


def in_reach(
    q: Holding, k: Holding, runs: Bounds, q_rows: Bounds, band: Bounds, keys: Bounds
) -> Ints:
    """Return slices between clusters of query rows and runs of keys.

    A *run* is all tokens of a document on one rank. A *cluster* is a set of query rows of a run
    that attend to a range of keys without gaps. A *slice* is a range of query rows and a range of
    key rows with a *band*, a range of allowed distances. There is one slice for each cluster that
    attends to at least one key of the run with which the cluster is compared. The result is an
    array (6, n) of q start and stop, k start and stop, lo and hi.

    Args:
        q: the holding of the queries.
        k: the holding of the keys.
        runs: for each cluster, the run of queries that contains it, and the run of keys with which
            it is compared.
        q_rows: the starts and stops of the clusters' rows.
        band: lo and hi of each cluster.
        keys: the range of key positions to which each cluster may attend.
    """
    (q_start, q_stop), (low, high), (first_key, key_limit) = q_rows, band, keys
    k_start = k.rows_before(runs[1], np.maximum(first_key, q.positions[q_start] + low))
    k_stop = k.rows_before(runs[1], np.minimum(key_limit, q.positions[q_stop - 1] + high + 1))
    table = np.stack([q_start, q_stop, k_start, k_stop, low, high, *runs])

    q_start, q_stop, k_start, k_stop, low, high, q_runs, k_runs = table = _nonempty(table, 2)
    table[0] = np.maximum(q_start, q.rows_before(q_runs, k.positions[k_start] - high))
    table[1] = np.minimum(q_stop, q.rows_before(q_runs, k.positions[k_stop - 1] - low + 1))

    q_start, q_stop, k_start, k_stop, low, high, q_runs, k_runs = table = _nonempty(table, 0)
    table[2] = np.maximum(k_start, k.rows_before(k_runs, q.positions[q_start] + low))
    table[3] = np.minimum(k_stop, k.rows_before(k_runs, q.positions[q_stop - 1] + high + 1))
    return _nonempty(table, 2)[:6]


def of_band(
    q: Holding, k: Holding, shift: Ints, left: int, right: int, prefix_lens: Sequence[int] | None
) -> Ints:
    """Return the slices of a mask with a window and a prefix, as an array (6, n).

    A *slice* is a range of query rows and a range of key rows with a range of allowed distances.
    The rows of the array are q start and stop, k start and stop, and the smallest and largest
    distance. `shift` is added to the positions of queries to align the last query with the last key
    of each document.
    """
    documents, q_start, q_stop = clusters(q, left + right)
    prefix = None if prefix_lens is None else np.array(prefix_lens, dtype=np.int64)
    first_key = np.zeros_like(documents) if prefix is None else prefix[documents]
    runs, keys = (documents, documents), (first_key, np.full_like(documents, UNLIMITED))
    band = shift[documents] - left, shift[documents] + right
    parts = [in_reach(q, k, runs, (q_start, q_stop), band, keys)]
    if prefix is not None:
        documents, first, stop = q.runs
        unlimited = np.full_like(documents, UNLIMITED)
        runs, rows = (documents, documents), (q.offsets[first], q.offsets[stop])
        keys = np.zeros_like(documents), prefix[documents]
        parts.append(in_reach(q, k, runs, rows, (-unlimited, unlimited), keys))
    return np.concatenate(parts, axis=1)


def _nonempty(table: Ints, start: int) -> Ints:
    """Return the columns of `table` whose range is not empty. Row `start` has the starts of ranges,
    and the next row has the stops.
    """
    return table[:, table[start + 1] > table[start]]
