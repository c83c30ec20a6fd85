"""Cut the work of attention into tasks, which any rank may compute."""

from __future__ import annotations

from typing import NamedTuple

from seqpar.arguments import Ints


class Tasks(NamedTuple):
    """Rectangles of query and key positions, and who computes each, as (n,) arrays.

    A task is the visible pairs in its rectangle. Together tasks have every visible pair once; what
    a mask hides may be in several, or in none. Positions count from the start of the document:
    those of queries among its queries, those of keys among its keys (`kv_layout` may have more).

    Attributes:
        documents: whose queries and keys.
        q_starts, q_stops: which queries.
        k_starts, k_stops: which keys.
        servers: the rank that computes the task.
    """

    documents: Ints
    q_starts: Ints
    q_stops: Ints
    k_starts: Ints
    k_stops: Ints
    servers: Ints
