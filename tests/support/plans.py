"""Plans of tasks for disaggregated attention, both sensible and absurd ones.

Attention must be right with each of them. A plan gets the geometry of queries and keys, and returns
tasks with their servers: the ranks that compute them.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from seqpar.layout.tasks.tasks import TaskRectangles


def tasks(rows):
    """Make tasks from rows of (document, q start, q stop, k start, k stop, server)."""
    return TaskRectangles(*np.array(rows, np.int64).reshape(-1, 6).T.copy())


def spans_of(geometry):
    """Yield (document, start, stop, rank) of every span."""
    for rank in range(geometry.ranks):
        for span in zip(*geometry.holdings[rank].columns, strict=True):
            yield *(int(x) for x in span), rank


def at_home(queries, keys, mask):
    """Compute every query on the rank that holds it, as Ring and AllGather do."""
    return tasks(
        [
            (document, start, stop, 0, keys.lengths[document], rank)
            for document, start, stop, rank in spans_of(queries)
        ]
    )


def at_keys(queries, keys, mask):
    """Compute with every key on the rank that holds it, as TokenRing does."""
    return tasks(
        [
            (document, 0, queries.lengths[document], start, stop, rank)
            for document, start, stop, rank in spans_of(keys)
        ]
    )


def half_to_next(queries, keys, mask):
    """Compute the first half of each span's queries on its rank, and the second on the next
    rank."""
    rows = []
    for document, start, stop, rank in spans_of(queries):
        half = (start + stop) // 2
        for first, last, server in ((start, half, rank), (half, stop, (rank + 1) % queries.ranks)):
            rows.append((document, first, last, 0, keys.lengths[document], server))
    return tasks(rows)


def to_next(queries, keys, mask):
    """Compute every query on the next rank, so each rank must first wait for messages."""
    table = at_home(queries, keys, mask)
    return table._replace(servers=(table.servers + 1) % queries.ranks)


@dataclass(frozen=True)
class OnOne:
    """Compute everything on one rank; the other ranks only send tokens."""

    rank: int

    def __call__(self, queries, keys, mask):
        lengths = zip(queries.lengths, keys.lengths, strict=True)
        return tasks([(i, 0, n, 0, m, self.rank) for i, (n, m) in enumerate(lengths)])


@dataclass(frozen=True)
class AtRandom:
    """Cut queries and keys at random, and compute each rectangle on a random rank."""

    seed: int
    cuts: int = 3

    def __call__(self, queries, keys, mask):
        random, rows = np.random.default_rng(self.seed), []

        def cut(length):
            inner = random.integers(0, length + 1, random.integers(0, self.cuts + 1))
            edges = np.unique(np.r_[0, inner, length])
            return list(pairwise(edges))

        for i, (n, m) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
            for q in cut(n):
                rows += [(i, *q, *k, random.integers(queries.ranks)) for k in cut(m)]
        return tasks(rows)


PLANS = {
    "at home": at_home,
    "at keys": at_keys,
    "half to next": half_to_next,
    "to next": to_next,
    "on one": OnOne(0),
    "at random": AtRandom(0),
}
