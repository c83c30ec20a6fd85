"""The division of a call of attention into tasks for servers.

The cut depends only on the layouts, the mask, the shapes and the options, and never on which
servers are available. If servers die, hang, leave or join, other servers compute the same tasks,
and the result has the same bits.

The cut uses the planner of `disaggregate`, which distributes attention over ranks. For this
planner, the trainer is rank 0, which stores all tokens and should compute nothing. In addition,
there is one *idle rank*, a rank without tokens, for each task. The work that the planner assigns to
an idle rank becomes one task.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.balance.disaggregation.cells import cells_of
from seqpar.balance.disaggregation.disaggregate import disaggregate
from seqpar.balance.disaggregation.row_bytes import RowBytes
from seqpar.core.arguments import Ints
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Slices
from seqpar.layout.tasks.task_rows import Segments, ServerRows, task_slices
from seqpar.layout.tasks.tasks import Parts
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.wire.row_messages import Rows

# By how much the work of a task can exceed the mean, as a fraction of the mean. Tried in this
# order.
_TOLERANCES = 0.05, 0.1, 0.2, 0.4, 0.8
_LEAST_TILES = 4  # the least number of square tiles in a task, so that a small call has fewer tasks


class CutTask(NamedTuple):
    """One task of a call."""

    queries: Rows  # rows of the call's q
    keys: Rows  # rows of the call's k and v
    slices: Slices  # the mask of these queries and keys
    whole: bool  # whether no other task has any of these query rows, so that the result is final


def cut_call(call: ResolvedCall, most: int, tile: int) -> list[CutTask]:
    """Cut a call whose tokens are all on one rank into tasks with about equal work.

    A planner assigns the work of the call to at most `most` tasks, and tries to send few bytes.
    Work that the planner does not assign becomes one more task. A task can have rows of any number
    of documents. The query rows of a task begin and end at a multiple of `tile` rows, or at the end
    of a document.
    """
    queries, keys = call.layout, call.kv_layout
    work = int(cells_of(queries, keys, call.mask).areas().sum())
    parts = _divided(call, min(most, work // (_LEAST_TILES * tile**2)), tile)
    once, shift = (np.zeros_like(parts.servers), 1), keys.lengths - queries.lengths
    of_queries = Segments.of_queries(parts, queries, *once)
    of_keys = Segments.of_keys(parts, keys, *once)
    often = _rows_in_several(of_queries, queries.tokens)
    found = []
    for number in np.unique(parts.servers).tolist():
        own_queries = of_queries.of(number)
        whole = not (often[own_queries.stops] - often[own_queries.starts]).any()
        q_rows, q_block = _rows_of(own_queries, queries)
        k_rows, k_block = _rows_of(of_keys.of(number), keys)
        own = parts.take(parts.servers == number)
        found.append(CutTask(q_rows, k_rows, task_slices(own, q_block, k_block, shift), whole))
    return found


def _divided(call: ResolvedCall, count: int, tile: int) -> Parts:
    """Return the parts into which a planner divides a call, each with its rank. All parts of one
    rank become one task.

    The planner distributes the work of rank 0, which stores all tokens, over `count` idle ranks. A
    task has whole tiles of `tile` rows, so some work can stay on rank 0. If rank 0 keeps more work
    than each of the idle ranks, the planner runs again with the next larger tolerance, which allows
    more work per idle rank. If the largest tolerance does not suffice, the number of idle ranks is
    halved. If fewer than two idle ranks are left, the whole call becomes one task.
    """
    s, queries, keys = call.shape, call.layout, call.kv_layout
    row_bytes = RowBytes.of(s.heads, s.kv_heads, s.dim, s.value_dim, s.dtype.itemsize)
    while count > 1:
        homes = _with_idle_ranks(queries, count), _with_idle_ranks(keys, count)
        for tolerance in _TOLERANCES:
            tasks = disaggregate(
                homes[0],
                call.mask,
                row_bytes=row_bytes,
                kv_layout=homes[1],
                tolerance=tolerance,
                weights=[0] + [1] * count,
                tile=tile,
            )
            parts = Parts.of(tasks, queries, keys, call.mask)
            areas = np.bincount(parts.servers, parts.areas(), 1 + count)
            if areas[0] <= areas[1:].max():
                return parts
        count //= 2
    return cells_of(queries, keys, call.mask)


def _with_idle_ranks(geometry: Geometry, count: int) -> Geometry:
    owner, *columns = geometry.all_spans()
    return Geometry(geometry.cu_seqlens, Spans.of(1 + count, owner, *columns))


def _rows_in_several(segments: Segments, tokens: int) -> Ints:
    """Return (tokens + 1,): for each row, the number of earlier rows that are in more than one
    task. The last element counts all such rows.
    """
    change = np.zeros(tokens + 1, np.int64)
    np.add.at(change, segments.starts, 1)
    np.add.at(change, segments.stops, -1)
    return np.r_[0, np.cumsum(change.cumsum()[:-1] > 1)]


def _rows_of(segments: Segments, geometry: Geometry) -> tuple[Rows, ServerRows]:
    """Return two descriptions of the rows of a task: where the rows are in the tensors of the call,
    and where they are in the tensors that are sent to the server.
    """
    # The trainer stores all tokens, so the index of a row in its tensors is the token's position in
    # the packed batch.
    starts, stops = segments.starts, segments.stops
    index, spans = geometry.holdings[0].spans_in(starts, stops)
    table = np.stack([np.zeros_like(index), *spans])
    return Rows(np.stack([starts, stops], 1)), ServerRows.of(table)
