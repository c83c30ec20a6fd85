"""One layer of a cache: its rows in segments, which servers store, and attention over them."""

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

_MAX_MESSAGE_BYTES = 2**25  # of rows
_AVOID_SECONDS = 5.0  # before a server that has lost a cache gets another one
_RETRY_SECONDS = 0.02  # before servers are tried again, with `home=False`
_cache_numbers = count(1)
_CPU = torch.device("cpu")
Source = Callable[[int, int], object]  # returns keys and values of rows start … stop − 1


class RecomputedRows:
    """Rows that the caller can compute again, like `Pages`. Written rows stay until `settle`."""

    def __init__(self, shape: RowShape, source: Source) -> None:
        """`source` returns settled rows: k (B, rows, Hkv, D) and v (B, rows, Hkv, Dv)."""
        self.shape, self.nbytes = shape, 0  # the bytes of their pages on a server
        self._source = source
        self._recent: tuple[int, Tensor, Tensor] | None = None

    def reserve(self, rows: int) -> None:
        """Expect the first `rows` rows."""
        self.nbytes = max(self.nbytes, self.shape.nbytes(rows))

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Keep rows from `start` on until `settle`."""
        k, v = (x.detach().to(_CPU, copy=True) for x in (k, v))
        self._recent = start, k, v

    def settle(self) -> None:
        """Drop the kept rows: the step is done."""
        self._recent = None

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of these rows, computed again if they are not kept."""
        first, *kept = self._recent or (stop, *self._nothing())
        known = max(start, min(first, stop))
        older = self._recompute(start, known) if start < known else self._nothing()
        newer = (x[:, known - first : stop - first] for x in kept)
        k, v = (torch.cat([x, y], 1) for x, y in zip(older, newer, strict=True))
        return k, v

    def attend(
        self, q: Tensor, length: int, seen: Seen, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        """Return attention over the first `length` rows; see `Pages.attend`."""
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
    """Queries (B, T, Hq, D), the rows that they attend to, and the options of their scores."""

    q: Tensor
    seen: Seen
    options: CallOptions


class Held(NamedTuple):
    """The rows of a segment that a server stores."""

    place: CachePlace
    number: int  # of the cache on that server
    writes: int = 0  # the number of steps that the cache has had
    rows: int = 0  # the number of first rows that equal this process's rows


class BegunStep(NamedTuple):
    """A step without an answer. After it, the server has the first `stop` rows."""

    held: Held
    stop: int
    answer: Answer


@dataclass(eq=False)
class SegmentServers:
    """The places of all segments of one cache."""

    pool: Dispatcher
    placed: dict[int, CachePlace] = field(default_factory=dict)  # by the segment's number
    avoided: dict[str, float] = field(default_factory=dict)  # until when, by address
    closed: bool = False  # then servers store nothing for the cache

    def hold(self, nbytes: int) -> Held | None:
        """Place an empty segment on the server with the most room; None if none has room."""
        if self.closed:
            if not self.pool.options.has_home:
                raise ServersError("the cache was closed before a step had its result")
            return None
        now = time.monotonic()
        place = self.pool.place_cache(nbytes, {x for x, end in self.avoided.items() if end > now})
        if place is None and not self.pool.options.has_home:
            place = self.pool.place_cache(nbytes, ())  # better than none
        if place is None:
            return None
        held = Held(place, next(_cache_numbers))
        self.placed[held.number] = place
        return held

    def forget(self, number: int) -> None:
        if (place := self.placed.pop(number, None)) is not None:
            self.pool.forget_cache(place, number)

    def forget_all(self) -> None:
        """Free all segments on their servers, and do not place any more."""
        self.closed = True
        for number in list(self.placed):
            self.forget(number)

    def avoid(self, place: CachePlace) -> None:
        self.avoided[place.address] = time.monotonic() + _AVOID_SECONDS


class Segment:
    """Consecutive rows of a layer's keys and values.

    `write` and `truncate` set the rows; `begin` and `finish` ask for attention over them. From the
    start of a step until its answer, the server's rows count as lost. After a failed step, this
    process therefore never relies on rows that the server may not have.
    """

    def __init__(self, servers: SegmentServers, own_rows: Pages | RecomputedRows) -> None:
        """`own_rows` has the rows that a server lacks."""
        self.length = 0
        self._servers, self._own_rows = servers, own_rows
        self._held: Held | None = None

    @property
    def held(self) -> tuple[str, int] | None:
        """The address of the server that stores it, and the bytes there, or None."""
        if self._held is None:
            return None
        return self._held.place.address, self._own_rows.shape.nbytes(self._held.rows)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Replace all rows after the first `start` with these (B, rows, Hkv, D and Dv)."""
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
        """Whether no server is known to have all rows."""
        return self.length > (0 if self._held is None else self._held.rows)

    def forget(self) -> None:
        if self._held is not None:
            self._servers.forget(self._held.number)
            self._held = None

    def drop(self, begun: BegunStep) -> None:
        """Cancel a step, and give up the server's rows."""
        begun.answer.cancel()  # first, so that a step that was not sent yet is not sent
        self._servers.forget(begun.held.number)

    def begin(self, query: Query) -> BegunStep | None:
        """Ask its server, and send the rows that it lacks, if they fit into one message."""
        held = self._held
        if held is None or self.length - held.rows > self._rows_at_once(held.place):
            return None
        return self._ask(held, self.length, query)

    def finish(self, query: Query, begun: BegunStep | None) -> tuple[Tensor, ...]:
        """Return out and lse in fp32 (fp64 for fp64). Any server first gets lost rows again."""
        result = self._result(query, begun)
        self._own_rows.settle()
        return result

    def _result(self, query: Query, begun: BegunStep | None) -> tuple[Tensor, ...]:
        start, reason = time.monotonic(), "no server has room for a cache"
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
        """Send all rows that a server lacks, in several messages if necessary, and ask it."""
        nothing = query._replace(q=query.q[:, :0])
        most = self._rows_at_once(held.place)
        while self.length - held.rows > most:
            self._answer(self._ask(held, held.rows + most, nothing))
            assert self._held is not None
            held = self._held
        return self._answer(self._ask(held, self.length, query))

    def _ask(self, held: Held, stop: int, query: Query) -> BegunStep:
        """Ask a server, and send the rows that it lacks up to `stop`."""
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
        """Wait for a server's answer. The server then has the rows that it was sent."""
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
        """Return the work of queries in the unit of `Request.work`."""
        shape = self._own_rows.shape
        return q.shape[:3].numel() * self.length * (shape.dim + shape.value_dim)

    def _rows_at_once(self, place: CachePlace) -> int:
        """Return how many rows one message to a server may have."""
        shape, most = self._own_rows.shape, min(place.bytes // 2, _MAX_MESSAGE_BYTES)
        return max(1, min(place.tokens // shape.batch, most // shape.row_bytes))


class LayerCache:
    """A layer's rows, in segments of `rows_per_segment` rows."""

    def __init__(
        self,
        servers: SegmentServers,
        shape: RowShape,
        rows_per_segment: int,
        batched: bool,
        source: Source | None,
    ) -> None:
        """`source` computes lost rows again; without it, this process keeps a copy of all rows."""
        self.shape = shape
        self.length = 0
        self.batched = batched  # whether its tensors have a batch dimension
        self.is_busy = False  # whether an answer is being computed
        self.segments: list[Segment] = []
        self._servers, self._rows_per_segment, self._source = servers, rows_per_segment, source

    def append(self, k: Tensor, v: Tensor) -> None:
        """Append rows, k (B, rows, Hkv, D) and v (B, rows, Hkv, Dv)."""
        most = self._rows_per_segment
        while rows := min(k.shape[1], most - self.length % most):
            i, start = divmod(self.length, most)
            if i == len(self.segments):
                self.segments.append(Segment(self._servers, self._own_rows(i * most)))
            self.segments[i].write(start, k[:, :rows], v[:, :rows])
            k, v, self.length = k[:, rows:], v[:, rows:], self.length + rows

    def _own_rows(self, first: int) -> Pages | RecomputedRows:
        """Make the storage, in this process, of the segment that begins at row `first`."""
        source = self._source
        if source is None:
            return Pages(self.shape, _CPU)
        return RecomputedRows(self.shape, lambda start, stop: source(first + start, first + stop))

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        for i, segment in enumerate(self.segments):
            segment.truncate(max(0, length - i * self._rows_per_segment))

    def send(self) -> None:
        """Send the servers all rows that they lack."""
        scores = CallOptions(1.0, 0.0, DEFAULT, deterministic=True)
        dtype, batch, heads, dim, _ = self.shape
        nothing = torch.empty((batch, 0, heads, dim), dtype=dtype, device=_CPU)
        query = Query(nothing, Seen(0, 0, 0), scores)
        for segment in self.segments:
            if segment.lacks:
                segment.finish(query, None)

    def held(self) -> Iterator[tuple[str, int]]:
        """Yield the address of each server that has rows, and its bytes."""
        yield from filter(None, (segment.held for segment in self.segments))

    def forget(self) -> None:
        for segment in self.segments:
            segment.forget()

    def ask(self, q: Tensor, options: AttendOptions, heads: HeadPlacement) -> ServerAnswer:
        """Ask for attention of queries (B, T, Hq, D), which `heads` may shard, at the last rows."""
        # A segment outside the window is asked too if its server lacks rows: the step carries them.
        offset, queries = self.length - q.shape[1], []
        for i, segment in enumerate(self.segments):
            seen = Seen(offset - i * self._rows_per_segment, *options.bounds)
            first, last = seen.rows(q.shape[1], segment.length)
            if first < last or segment.lacks:
                rows = q if first < last else q[:, :0]
                queries.append((segment, Query(rows, seen, options.scores)))
        return ServerAnswer(self, q, options, queries, heads)


class ServerAnswer:
    """Attention that servers compute. `ServerCache.post` makes it."""

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
        # The caller may drop the answer without calling `result`.
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
        """Wait for the result and return it. It can be called once."""
        if not self._end.alive:
            raise ValueError("result() was called before: it returns once")
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
    """Free a layer for its next answer; steps without an answer are lost."""
    for (segment, _), each in zip(queries, begun, strict=False):
        if each is not None:
            segment.drop(each)
    layer.is_busy = False
