"""The keys and values of one layer of a `ServerCache`, and attention over them.

* A *row* is the key and the value of one token, in all sequences of the batch.
* A *segment* is a range of consecutive rows of a layer. One server stores the segment. If the
  server is lost, this process sends the segment to another server. For this purpose, it keeps a
  copy of the segment's rows, or can compute the rows again.
* A *step* is a request for one segment. The step carries queries, and those rows of the segment
  that the server does not have. The server appends the rows to the segment, and computes attention
  of the queries over the segment.
* A *place* is a server together with the session of this process on this server.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT
from seqpar.attention.operators import without_autocast
from seqpar.comm.dtensor import HeadPlacement
from seqpar.core.arguments import shown
from seqpar.core.compiling import outside_graphs
from seqpar.servers.cache.attend_options import AttendOptions
from seqpar.servers.pool.connection import Answer, CachePlace
from seqpar.servers.pool.dispatcher import Dispatcher, StepLostError
from seqpar.servers.wire.codec import pack_step
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.servers.wire.request import ServersError, received
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import Partial

_MAX_MESSAGE_BYTES = 2**25  # the most bytes of rows in one message
_AVOID_SECONDS = 5.0  # after a server has lost a cache, others are preferred for this time
_RETRY_SECONDS = 0.02  # the pause before servers are tried again, if the pool has `home=False`
_cache_numbers = count(1)
_CPU = torch.device("cpu")
# Called with (start, stop); returns k and v of rows start … stop − 1.
Source = Callable[[int, int], object]


class RecomputedRows:
    """The rows of a segment, for a process that computes rows again instead of keeping a copy.

    A row is the key and the value of one token, and a segment is a range of rows that one server
    stores.

    Rows that were passed to `write` are kept until `settle` is called.
    """

    def __init__(self, shape: RowShape, source: Source) -> None:
        """`source(start, stop)` computes k (B, rows, Hkv, D) and v (B, rows, Hkv, Dv) of the rows
        start … stop − 1.
        """
        # Nbytes: the bytes of the pages that a server needs for the rows.
        self.shape, self.nbytes = shape, 0
        self._source = source
        self._recent: tuple[int, Tensor, Tensor] | None = None

    def reserve(self, rows: int) -> None:
        self.nbytes = max(self.nbytes, self.shape.nbytes(rows))

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Keep rows `start` and later, until `settle` is called."""
        k, v = (x.detach().to(_CPU, copy=True) for x in (k, v))
        self._recent = start, k, v

    def settle(self) -> None:
        self._recent = None

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return k and v of rows start … stop − 1. Rows that are not kept are computed again."""
        first, *kept = self._recent or (stop, *self._nothing())
        known = max(start, min(first, stop))
        older = self._recompute(start, known) if start < known else self._nothing()
        newer = (x[:, known - first : stop - first] for x in kept)
        k, v = (torch.cat([x, y], 1) for x, y in zip(older, newer, strict=True))
        return k, v

    def attend(
        self, q: Tensor, length: int, seen: Seen, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        rows = length if q.numel() else 0
        pages = Pages(self.shape, _CPU)
        pages.reserve(rows)
        pages.write(0, *self.read(0, rows))
        return pages.attend(q, rows, seen, options)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        return Pages(self.shape, _CPU).read(0, 0)

    def _recompute(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        rebuilt, rows = self._source(start, stop), stop - start
        dtype, batch, heads, *dims = self.shape
        shapes = [(batch, rows, heads, dim) for dim in dims]
        if not (
            isinstance(rebuilt, tuple)
            and [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in rebuilt]
            == [(shape, dtype) for shape in shapes]
        ):
            expected = f"k and v of {rows} tokens, {shapes[0]} and {shapes[1]} of {dtype}"
            raise ValueError(f"rebuild must return {expected}, got {shown(rebuilt)}")
        k, v = (x.detach().to(_CPU) for x in rebuilt)
        return k, v


class Query(NamedTuple):
    """The queries (B, T, Hq, D) of a decoding step, the rows of keys to which they attend, the
    scale and the softcap.
    """

    q: Tensor
    seen: Seen
    options: CallOptions


class Held(NamedTuple):
    place: CachePlace
    number: int  # the number by which the server finds the segment's cache
    writes: int = 0  # how many steps the server has computed for the segment
    # The number of the segment's first rows that the server stores in their current state.
    rows: int = 0


class BegunStep(NamedTuple):
    """A request of a decoding step that the server has not answered yet. After its answer, the
    server stores the first `stop` rows of keys and values.
    """

    held: Held
    stop: int
    answer: Answer


@dataclass(eq=False)
class SegmentServers:
    pool: Dispatcher
    placed: dict[int, CachePlace] = field(default_factory=dict)  # by the segment's number
    # For each server that has lost a cache: the time until which other servers are preferred.
    avoided: dict[str, float] = field(default_factory=dict)
    closed: bool = False  # whether the cache was closed; servers then store nothing for it

    def hold(self, nbytes: int) -> Held | None:
        """Reserve `nbytes` for a new segment of a cache, on the server with the most free memory.

        Returns None if no server has enough memory, or if the cache was closed. If the cache was
        closed and the pool has `home=False`, this method raises a ServersError.
        """
        if self.closed:
            if not self.pool.options.has_home:
                raise ServersError("the cache was closed before a step had its result")
            return None
        now = time.monotonic()
        place = self.pool.place_cache(nbytes, {x for x, end in self.avoided.items() if end > now})
        if place is None and not self.pool.options.has_home:
            # A server that has just lost a cache is better than no server.
            place = self.pool.place_cache(nbytes, ())
        if place is None:
            return None
        held = Held(place, next(_cache_numbers))
        self.placed[held.number] = place
        return held

    def forget(self, number: int) -> None:
        if (place := self.placed.pop(number, None)) is not None:
            self.pool.forget_cache(place, number)

    def forget_all(self) -> None:
        self.closed = True
        for number in list(self.placed):
            self.forget(number)

    def avoid(self, place: CachePlace) -> None:
        self.avoided[place.address] = time.monotonic() + _AVOID_SECONDS


class Segment:
    """A range of consecutive rows of a layer, stored by one server. A row is the key and the value
    of one token.

    `write` and `truncate` change the rows in this process. `begin` sends the server the queries of
    a decoding step and the rows that the server does not have, and `finish` returns attention of
    these queries over all rows. If a step fails, this process sends all rows again.
    """

    def __init__(self, servers: SegmentServers, own_rows: Pages | RecomputedRows) -> None:
        """`own_rows` stores or recomputes the rows of the segment in this process."""
        self.length = 0
        self._servers, self._own_rows = servers, own_rows
        self._held: Held | None = None

    @property
    def held(self) -> tuple[str, int] | None:
        if self._held is None:
            return None
        return self._held.place.address, self._own_rows.shape.nbytes(self._held.rows)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Keep the first `start` rows, and replace all later rows.

        The new rows are k (B, rows, Hkv, D) and v (B, rows, Hkv, Dv).
        """
        stop = start + k.shape[1]
        self._own_rows.reserve(stop)
        self.truncate(start)
        self._own_rows.write(start, k, v)
        self.length = stop

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        if self._held is not None and self._held.rows > length:
            self._held = self._held._replace(rows=length)

    @property
    def lacks(self) -> bool:
        return self.length > (0 if self._held is None else self._held.rows)

    def forget(self) -> None:
        if self._held is not None:
            self._servers.forget(self._held.number)
            self._held = None

    def drop(self, begun: BegunStep) -> None:
        """Cancel a step, and free the segment's rows on the server."""
        begun.answer.cancel()  # first, so that no step is sent after the rows are freed
        self._servers.forget(begun.held.number)

    def begin(self, query: Query) -> BegunStep | None:
        """Send the server a step: the queries, and the rows of the segment that the server does not
        have.

        If no server stores the segment, or the missing rows do not fit into one message, this
        method returns None and sends nothing. In these cases, `finish` sends the rows.
        """
        held = self._held
        if held is None or self.length - held.rows > self._rows_at_once(held.place):
            return None
        return self._ask(held, self.length, query)

    def finish(self, query: Query, begun: BegunStep | None) -> tuple[Tensor, ...]:
        """Return out and lse of the step that `begin` has sent. Both results are in fp32 or, for
        fp64 queries, in fp64.

        If `begun` is None or the server did not answer the step, this process sends the missing
        rows to a server, and the server computes the step. If no server can compute the step, this
        process computes it.
        """
        result = self._result(query, begun)
        self._own_rows.settle()
        return result

    def _result(self, query: Query, begun: BegunStep | None) -> tuple[Tensor, ...]:
        start, reason = time.monotonic(), "no ready server has enough free memory for a cache"
        if begun is not None:
            try:
                return self._answer(begun)
            except StepLostError as error:
                reason = str(error)
        options = self._servers.pool.options
        while True:
            held = self._held or self._servers.hold(self._own_rows.nbytes)
            if held is not None:
                try:
                    return self._fill(held, query)
                except StepLostError as error:
                    reason = str(error)
            waited = time.monotonic() - start
            if options.has_home and (held is None or waited > options.deadlines.hedge):
                return self._compute(query)
            if waited > options.deadlines.give_up:
                raise ServersError(f"a step has no result after {waited:.0f} s: {reason}")
            time.sleep(0.0 if options.has_home else _RETRY_SECONDS)

    def _fill(self, held: Held, query: Query) -> tuple[Tensor, ...]:
        """Send the server all rows that it does not have, in one or several requests, and return
        the result of the last request.
        """
        nothing = query._replace(q=query.q[:, :0])
        most = self._rows_at_once(held.place)
        while self.length - held.rows > most:
            self._answer(self._ask(held, held.rows + most, nothing))
            assert self._held is not None
            held = self._held
        return self._answer(self._ask(held, self.length, query))

    def _ask(self, held: Held, stop: int, query: Query) -> BegunStep:
        self._held, q = None, query.q
        try:
            operands = q, *self._own_rows.read(held.rows, stop)
            cache = held.number, held.writes, held.rows
            packed = pack_step(*cache, operands, query.seen, query.options)
            pool, cost = self._servers.pool, self._cost(q)
            return BegunStep(held, stop, pool.submit_step(held.place, packed, q.device, cost))
        except BaseException:
            self._servers.forget(held.number)
            raise

    def _answer(self, begun: BegunStep) -> tuple[Tensor, ...]:
        held = begun.held
        try:
            result = received(begun.answer)
        except BaseException as error:
            self._servers.forget(held.number)
            if isinstance(error, StepLostError) and error.blame:
                self._servers.avoid(held.place)
            raise
        self._held = held._replace(writes=held.writes + 1, rows=begun.stop)
        return result

    def _compute(self, query: Query) -> tuple[Tensor, ...]:
        if query.q.numel():
            self._servers.pool.count_at_home(self._cost(query.q))
        return self._own_rows.attend(query.q, self.length, query.seen, query.options)

    def _cost(self, q: Tensor) -> int:
        shape = self._own_rows.shape
        return q.shape[:3].numel() * self.length * (shape.dim + shape.value_dim)

    def _rows_at_once(self, place: CachePlace) -> int:
        shape, most = self._own_rows.shape, min(place.bytes // 2, _MAX_MESSAGE_BYTES)
        return max(1, min(place.tokens // shape.batch, most // shape.row_bytes))


class LayerCache:
    """The rows of one layer, divided into segments of `rows_per_segment` rows."""

    def __init__(
        self,
        servers: SegmentServers,
        shape: RowShape,
        rows_per_segment: int,
        batched: bool,
        source: Source | None,
    ) -> None:
        """`source` is a function that computes rows again. If `source` is None, this process keeps
        a copy of all rows.
        """
        self.shape = shape
        self.length = 0
        self.batched = batched  # whether the caller's tensors have a batch dimension
        self.is_busy = False  # whether there is an answer whose result was not taken yet
        self.segments: list[Segment] = []
        self._servers, self._rows_per_segment, self._source = servers, rows_per_segment, source

    def append(self, k: Tensor, v: Tensor) -> None:
        most = self._rows_per_segment
        while rows := min(k.shape[1], most - self.length % most):
            i, start = divmod(self.length, most)
            if i == len(self.segments):
                self.segments.append(Segment(self._servers, self._own_rows(i * most)))
            self.segments[i].write(start, k[:, :rows], v[:, :rows])
            k, v, self.length = k[:, rows:], v[:, rows:], self.length + rows

    def _own_rows(self, first: int) -> Pages | RecomputedRows:
        source = self._source
        if source is None:
            return Pages(self.shape, _CPU)
        return RecomputedRows(self.shape, lambda start, stop: source(first + start, first + stop))

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        for i, segment in enumerate(self.segments):
            segment.truncate(max(0, length - i * self._rows_per_segment))

    def send(self) -> None:
        scores = CallOptions(1.0, 0.0, DEFAULT, deterministic=True)
        dtype, batch, heads, dim, _ = self.shape
        nothing = torch.empty((batch, 0, heads, dim), dtype=dtype, device=_CPU)
        query = Query(nothing, Seen(0, 0, 0), scores)
        for segment in self.segments:
            if segment.lacks:
                segment.finish(query, None)

    def held(self) -> Iterator[tuple[str, int]]:
        """Yield the server's address and the stored bytes of each segment that a server stores."""
        yield from filter(None, (segment.held for segment in self.segments))

    def forget(self) -> None:
        for segment in self.segments:
            segment.forget()

    def ask(self, q: Tensor, options: AttendOptions, heads: HeadPlacement) -> ServerAnswer:
        """Start attention of the last T tokens' queries q (B, T, Hq, D) over all rows.

        `heads` says how the query heads of q are sharded.
        """
        # If a server lacks rows of a segment outside of the window, it gets a step too, because
        # rows are sent only with steps.
        offset, queries = self.length - q.shape[1], []
        for i, segment in enumerate(self.segments):
            seen = Seen(offset - i * self._rows_per_segment, *options.bounds)
            first, last = seen.rows(q.shape[1], segment.length)
            if first < last or segment.lacks:
                rows = q if first < last else q[:, :0]
                queries.append((segment, Query(rows, seen, options.scores)))
        return ServerAnswer(self, q, options, queries, heads)


class ServerAnswer:
    """The result of `ServerCache.post`, while servers compute it."""

    def __init__(
        self,
        layer: LayerCache,
        q: Tensor,
        options: AttendOptions,
        queries: list[tuple[Segment, Query]],
        heads: HeadPlacement,
    ) -> None:
        self._layer, self._q, self._options, self._heads = layer, q, options, heads
        self._queries, self._begun = queries, list[BegunStep | None]()
        # If the caller drops the answer without calling `result`, its steps are cancelled.
        self._end = weakref.finalize(self, _drop, layer, queries, self._begun)
        self._end.atexit = False
        layer.is_busy = True
        try:
            for segment, query in queries:
                self._begun.append(segment.begin(query))
        except BaseException:
            self._end()
            raise

    @outside_graphs
    @torch.no_grad()
    def result(self) -> Tensor | tuple[Tensor, Tensor]:
        """Wait for the result, and return it as `ServerCache.attend` does. Call this only once."""
        if not self._end.alive:
            raise ValueError("result() was called before: keep what the first call returned")
        q, options = self._q, self._options
        total = Partial.nothing(q, q.new_empty(self._layer.shape.value_dim))
        try:
            with without_autocast(q):
                for i, (segment, query) in enumerate(self._queries):
                    begun, self._begun[i] = self._begun[i], None
                    out, lse = segment.finish(query, begun)
                    if query.q.numel() and total.empty:
                        total = Partial.of(out, lse.double())
                    elif query.q.numel():
                        total.merge(slice(None), out, lse)
        finally:
            self._end()
        out, lse = total.finish(options.sinks, q.dtype)
        out, lse = (out, lse) if self._layer.batched else (out[0], lse[0])
        out, lse = self._heads.restore(out, -2), self._heads.restore(lse, -1)
        return (out, lse) if options.return_lse else out


def _drop(
    layer: LayerCache, queries: list[tuple[Segment, Query]], begun: list[BegunStep | None]
) -> None:
    """Cancel the steps of a `ServerAnswer` whose result was not requested."""
    for (segment, _), each in zip(queries, begun, strict=False):
        if each is not None:
            segment.drop(each)
    layer.is_busy = False
