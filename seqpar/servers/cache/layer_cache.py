"""One layer of a cache: its rows in segments, and attention over them."""

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
from seqpar.servers.cache.recomputed_rows import RecomputedRows, Source
from seqpar.servers.cache.segment import BegunStep, Query, Segment, SegmentServers
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import Partial


class LayerCache:
    """A layer's rows, in segments of `rows_per_segment` rows.

    Attributes:
        length: the number of rows.
        batched: whether its tensors have a batch dimension.
        is_busy: whether an answer is being computed.
    """

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
        self.batched = batched
        self.is_busy = False
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
            return Pages(self.shape, torch.device("cpu"))
        return RecomputedRows(self.shape, lambda start, stop: source(first + start, first + stop))

    def truncate(self, length: int) -> None:
        """Drop all rows except the first `length`."""
        self.length = min(self.length, length)
        for i, segment in enumerate(self.segments):
            segment.truncate(max(0, length - i * self._rows_per_segment))

    def send(self) -> None:
        """Send the servers all rows that they lack."""
        scores = CallOptions(1.0, 0.0, DEFAULT, deterministic=True)
        nothing = torch.empty((self.shape.batch, 0, self.shape.kv_heads, self.shape.dim))
        query = Query(nothing.to(self.shape.dtype), Seen(0, 0, 0), scores)
        for segment in self.segments:
            if segment.lacks:
                segment.finish(query, None)

    def held(self) -> Iterator[tuple[str, int]]:
        """Yield the address of each server that has rows, and its bytes."""
        yield from filter(None, (segment.held for segment in self.segments))

    def forget(self) -> None:
        """Free the layer's rows on its servers."""
        for segment in self.segments:
            segment.forget()

    def ask(self, q: Tensor, options: AttendOptions, heads: HeadPlacement) -> ServerAnswer:
        """Ask for attention of queries (B, T, Hq, D) at the last positions.

        `heads` places the heads among those of all ranks if they are sharded.
        """
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
