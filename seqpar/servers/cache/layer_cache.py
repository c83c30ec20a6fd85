"""A layer of a cache: its rows in segments, and what is asked of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT
from seqpar.attention.operators import without_autocast
from seqpar.comm.dtensor import HeadPlacement
from seqpar.core.compiling import outside_graphs
from seqpar.servers.cache.attend_options import AttendOptions
from seqpar.servers.cache.recomputed_rows import Rebuilt, Source
from seqpar.servers.cache.segment import BegunStep, Query, Segment, SegmentServers
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import Partial


class LayerCache:
    """The rows of a layer, `most` of them in each segment.

    Attributes:
        shape: of its rows.
        length: how many it has.
        segments: they.
        batched: whether its tensors have a batch dimension.
        asked: whether something was asked of it that has not been returned.
    """

    def __init__(
        self,
        servers: SegmentServers,
        shape: RowShape,
        most: int,
        batched: bool,
        source: Source | None,
    ) -> None:
        """`source` returns rows that were there before, or home keeps a copy of them."""
        self.shape, self.length, self.batched, self.asked = shape, 0, batched, False
        self.segments: list[Segment] = []
        self._servers, self._most, self._source = servers, most, source

    def append(self, k: Tensor, v: Tensor) -> None:
        """Put rows (B, rows, Hkv, D and Dv) behind the others."""
        while rows := min(k.shape[1], self._most - self.length % self._most):
            i, start = divmod(self.length, self._most)
            if i == len(self.segments):
                self.segments.append(Segment(self._servers, self._home(i * self._most)))
            self.segments[i].write(start, k[:, :rows], v[:, :rows])
            k, v, self.length = k[:, rows:], v[:, rows:], self.length + rows

    def _home(self, first: int) -> Pages | Rebuilt:
        """Return where a segment that begins at this row is read from."""
        source = self._source
        if source is None:
            return Pages(self.shape, torch.device("cpu"))
        return Rebuilt(self.shape, lambda start, stop: source(first + start, first + stop))

    def truncate(self, length: int) -> None:
        """Drop all rows but the first so many."""
        self.length = min(self.length, length)
        for i, segment in enumerate(self.segments):
            segment.truncate(max(0, length - i * self._most))

    def send(self) -> None:
        """Send servers what they lack."""
        scores = CallOptions(1.0, 0.0, DEFAULT, deterministic=True)
        nothing = torch.empty((self.shape.batch, 0, self.shape.kv_heads, self.shape.dim))
        query = Query(nothing.to(self.shape.dtype), Seen(0, 0, 0), scores)
        for segment in self.segments:
            if segment.lacks:
                segment.finish(query, None)

    def held(self) -> Iterator[tuple[str, int]]:
        """Yield which server has how many bytes, by address."""
        yield from filter(None, (segment.held for segment in self.segments))

    def forget(self) -> None:
        """Let servers free what they hold."""
        for segment in self.segments:
            segment.forget()

    def ask(self, q: Tensor, asked: AttendOptions, heads: HeadPlacement) -> ServerAnswer:
        """Ask for attention of queries (B, T, Hq, D) at the last positions.

        `heads` says which they are of sharded ones. Segments are asked that they see, and those of
        which no server has all rows.
        """
        offset, queries = self.length - q.shape[1], []
        for i, segment in enumerate(self.segments):
            seen = Seen(offset - i * self._most, *asked.bounds)
            first, last = seen.rows(q.shape[1], segment.length)
            if first < last or segment.lacks:
                sees = q if first < last else q[:, :0]
                queries.append((segment, Query(sees, seen, asked.scores)))
        return ServerAnswer(self, q, asked, queries, heads)


class ServerAnswer:
    """Attention that servers compute, made by `ServerCache.post`."""

    def __init__(
        self,
        layer: LayerCache,
        q: Tensor,
        asked: AttendOptions,
        queries: list[tuple[Segment, Query]],
        heads: HeadPlacement,
    ) -> None:
        """Ask the segments what they are asked, in order."""
        self._layer, self._q, self._asked, self._heads = layer, q, asked, heads
        self._queries, self._begun = queries, list[BegunStep | None]()
        # Which may be dropped by whoever does not want it.
        self._end = weakref.finalize(self, _drop, layer, queries, self._begun)
        self._end.atexit = False
        layer.asked = True
        try:
            for segment, query in queries:
                self._begun.append(segment.begin(query))
        except BaseException:
            self._end()
            raise

    @outside_graphs
    @torch.no_grad()
    def result(self) -> Tensor | tuple[Tensor, Tensor]:
        """Wait for it, and return it, once."""
        if not self._end.alive:
            raise ValueError("result() was called before: it returns once")
        q, asked = self._q, self._asked
        total = Partial.nothing(q, q.new_empty(self._layer.shape.value_dim))
        try:
            with without_autocast(q):
                for i, (segment, query) in enumerate(self._queries):
                    begun, self._begun[i] = self._begun[i], None
                    out, lse = segment.finish(query, begun)
                    if query.q.numel() and total.empty:
                        total = Partial(out, lse.double())
                    elif query.q.numel():
                        total.merge(slice(None), out, lse)
        finally:
            self._end()
        out, lse = total.finish(asked.sinks, q.dtype)
        out, lse = (out, lse) if self._layer.batched else (out[0], lse[0])
        out, lse = self._heads.restore(out, -2), self._heads.restore(lse, -1)
        return (out, lse) if asked.return_lse else out


def _drop(
    layer: LayerCache, queries: list[tuple[Segment, Query]], begun: list[BegunStep | None]
) -> None:
    """Let a layer be asked again; what has not answered is lost."""
    for (segment, _), each in zip(queries, begun, strict=False):
        if each is not None:
            segment.drop(each)
    layer.asked = False
