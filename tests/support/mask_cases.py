"""Random masks of ranges, and which query sees which key, pair by pair from the definition."""

import numpy as np

FULL = (None, None)


def seen_in_range(row, lengths, kv_lengths):
    """Return (T, T_kv) bool: which pairs of a packed batch one range contains."""
    document, q_start, q_stop, k_start, k_stop, low, high = row
    of_queries, of_keys = positions(lengths), positions(kv_lengths)
    (q_document, i), (k_document, j) = of_queries, of_keys
    seen = (q_document[:, None] == document) & (k_document[None, :] == document)
    seen &= ((i >= q_start) & (i < q_stop))[:, None] & ((j >= k_start) & (j < k_stop))[None, :]
    distance = j[None, :] - i[:, None]
    seen &= (distance >= low) if low is not None else True
    seen &= (distance <= high) if high is not None else True
    return seen


def positions(lengths):
    """Return (2, T): the document of each token of a packed batch, and its position there."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    return np.stack([document, np.concatenate([np.arange(0), *map(np.arange, lengths)])]).astype(
        int
    )


def times_seen(rows, cu, kv_cu=None):
    """Return (T, T_kv): the number of ranges that contain each pair."""
    lengths, kv_lengths = np.diff(cu), np.diff(cu if kv_cu is None else kv_cu)
    count = np.zeros((lengths.sum(), kv_lengths.sum()), int)
    for row in rows:
        count += seen_in_range(row, lengths, kv_lengths)
    return count


def any_range(random, lengths, kv_lengths):
    """Draw a range of any document: often of one query or key; full, cut, or a band."""
    document = int(random.integers(len(lengths)))

    def stretch(length):
        start = int(random.integers(0, length + 1))
        longest = [1, 3, length][random.integers(3)]
        return start, min(length, start + int(random.integers(0, longest + 1)))

    low, high = sorted(random.integers(-6, 7, 2).tolist())
    bounds = [FULL, (None, high), (low, None), (low, high), (0, 0)][random.integers(5)]
    edges = *stretch(lengths[document]), *stretch(kv_lengths[document])
    return document, *edges, *bounds


def disjoint_ranges(seed, cu, kv_cu=None, tries=12):
    """Draw disjoint ranges.

    A drawn range is kept if it overlaps with no range before it. For a range with a limited band,
    the pairs of its rectangle that lie behind the band are tried as a second range.
    """
    random = np.random.default_rng(seed)
    lengths, kv_lengths = np.diff(cu), np.diff(cu if kv_cu is None else kv_cu)
    count, kept = np.zeros((lengths.sum(), kv_lengths.sum()), int), []
    for _ in range(tries if len(lengths) else 0):
        row = any_range(random, lengths, kv_lengths)
        beside = [] if row[6] is None else [(*row[:5], row[6] + 1, None)]
        for some in (row, *beside):
            seen = seen_in_range(some, lengths, kv_lengths)
            if not (count * seen).any():
                kept.append(some)
                count += seen
    return tuple(kept)
