"""`deterministic="ranks"`: attention with the same bits on any number of ranks and in any layout.

A *tile* is a range of queries between fixed positions of a document (`rank_invariant_plan.py`). One
rank computes the attention of a whole tile over all keys to which the tile attends.

On CPUs, a backend call computes one tile for one batch entry and for one KV head with its query
heads, on one torch thread. The operands of the call always have the same shapes, strides, alignment
and masks. The bits of the result therefore depend neither on the number of heads of a rank nor on
the number of threads. On CUDA and in Triton's interpreter, a backend call computes all heads of one
tile. Within this call, a separate Triton program computes each head, so the bits do not depend on
the number of heads either.

Letters of shapes: B is the batch, n the number of rows of a tile, m the number of keys to which the
tile attends, H the number of heads, and D the head dim.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from functools import partial as bind
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.core.background import in_this_mode, set_own_threads
from seqpar.core.device_tables import is_on_cuda
from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.reshard import move
from seqpar.softmax.attend import attend, attend_backward
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.compute.partial import (
    OutputGradient,
    PackedGradients,
    Partial,
    PartialGradients,
)
from seqpar.softmax.keys.key_exchange import travelling_keys
from seqpar.softmax.keys.key_plan import Distances, KeyPlan
from seqpar.softmax.keys.rank_invariant_plan import TilePlan, Unit
from seqpar.softmax.strategy import ForwardResult, Gradients
from seqpar.softmax.wire.row_messages import Rows

_ALIGNMENT = 64  # bytes of a cache line; the keys of a call begin at a multiple of this number
# In rows. The keys of each head begin at a multiple of this number, and therefore at a cache line.
_ROWS_ALIGNMENT = 64


T = TypeVar("T")


class HeadTile(NamedTuple):
    """The batch entries, query heads and KV heads that one backend call computes."""

    batch: slice
    heads: slice
    kv_heads: slice

    def rows_of(self, x: Tensor, rows: slice) -> Tensor:
        """Copy rows of x (B, T, H, …), for the batch entries and heads of this object.

        The copy has the shape (b, n, h, …). In memory, the copy is ordered by heads. A view of x
        cannot be used, because the strides and the alignment of a view would depend on the number
        of ranks.
        """
        by_heads = x[self.batch, rows, self.heads].transpose(1, 2)
        return by_heads.new_empty(by_heads.shape).copy_(by_heads).transpose(1, 2)

    def options(self, options: CallOptions) -> CallOptions:
        slopes = options.slopes
        if slopes is None:
            return options
        slopes = slopes[self.batch] if len(slopes) > 1 else slopes
        return options.with_slopes(slopes[:, self.heads])


class TileCall:
    def __init__(self, comm: Comm, call: ResolvedCall, distances: Distances, label: str) -> None:
        """Plan the exchanges of keys.

        The exchanges of all steps are posted together.

        Args:
            comm: the ranks that exchange keys.
            call: the attention call.
            distances: the distances of each step.
            label: the name of the messages in errors and traces.
        """
        self._comm, self._call, self._label = comm, call, label
        self._plan = call.once(("tile plan", distances), lambda: TilePlan.of(call, distances))
        self._tiled = self._plan.moved or call.layout
        tiled = call.altered(layout=self._tiled)
        self._keys = tiled.once(("keys", distances), lambda: KeyPlan(tiled, distances, True))
        self._options = call.options._replace(rank_invariant=True)

    def forward(self, operands: Operands) -> ForwardResult:
        q, k, v, sinks = operands
        q = self._move(q)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulator_dtype(q.dtype))
        pool, parts = self._pool(k, v), self._parts(q, k)

        def compute(unit: Unit, part: HeadTile) -> tuple[HeadTile, MaxLogits | None]:
            keys, values = pool.of_unit(unit, part)
            queries = part.rows_of(q, unit.rows)
            partial = Partial.nothing(queries, values, rank_invariant=True, single=True)
            max_logits = None if self._call.max_logits is None else MaxLogits.nothing(queries)
            options = part.options(self._options)
            attend(queries, keys, values, unit.slices, partial, options, max_logits)
            at = part.batch, unit.rows, part.heads
            out[at], lse[at] = partial.finish(None if sinks is None else sinks[part.heads], q.dtype)
            return part, max_logits

        def jobs() -> Iterator[Callable[[], tuple[HeadTile, MaxLogits | None]]]:
            for units in self._plan.nodes:
                for unit in units:
                    pool.fill(unit.ready)
                    for part in parts:
                        yield bind(compute, unit, part)

        for part, max_logits in self._run(q, jobs()):
            if max_logits is not None:
                assert self._call.max_logits is not None
                self._call.max_logits.of_heads(part.heads).update(max_logits.values)
        pool.fill()  # also receives the messages that no tile needs
        return ForwardResult(self._move(out, back=True), self._move(lse, back=True), [])

    def gradients(self, output: OutputGradient, operands: Operands) -> Gradients:
        q, k, v, _ = operands
        output, q = self._output_to_tiles(output, q)
        dq = q.new_zeros(q.shape, dtype=accumulator_dtype(q.dtype))
        dk, dv = self._return(self._sums(output, q, k, v, dq), k, v)
        return self._move(dq, back=True), dk, dv

    def _sums(
        self, output: OutputGradient, q: Tensor, k: Tensor, v: Tensor, dq: Tensor
    ) -> list[SumBlock]:
        """Write dq of the tiles that this rank computes to `dq`, and return sums of dk and dv.

        A *tile* is a range of queries of a document. The contributions of tiles to dk and dv are
        added along a binary tree (`tree_sum`). The result has one sum for each subtree whose tiles
        this rank computes.
        """
        pool, parts = self._pool(k, v), self._parts(q, k)
        (batch, _, heads, _), dims = k.shape, [k.shape[3], v.shape[3]]

        def compute(unit: Unit, part: HeadTile, total: PackedGradients) -> Tensor:
            """Add the gradients of some heads of one tile to `dq` and `total`. Return
            `total.packed`.
            """
            assert output.out is not None
            keys, values = pool.of_unit(unit, part)
            queries, dout, out, lse = (
                part.rows_of(x, unit.rows) for x in (q, output.dout, output.out, output.lse)
            )
            dlse = None if output.dlse is None else part.rows_of(output.dlse, unit.rows)
            part_dq = queries.new_zeros(queries.shape, dtype=dq.dtype)
            dk, dv = (x[part.batch, :, part.kv_heads] for x in (total.dk, total.dv))
            part_output = OutputGradient(dout, out, lse, dlse)
            sums, options = PartialGradients.of(part_dq, dk, dv), part.options(self._options)
            attend_backward(part_output, queries, keys, values, unit.slices, sums, options)
            dq[part.batch, unit.rows, part.heads] = part_dq
            return total.packed

        def jobs() -> Iterator[Callable[[], Tensor]]:
            for units in self._plan.nodes:
                for unit in units:
                    pool.fill(unit.ready)
                    rows = sum(keys.stop - keys.start for keys in unit.keys)
                    total = PackedGradients.over(dq, (rows, batch, heads), dims)
                    for part in parts:
                        yield bind(compute, unit, part, total)

        packed = self._run(q, jobs())

        def block(unit: Unit) -> SumBlock:
            # all of them return the same tensor, which is complete after the last one
            for _ in parts:
                rows = next(packed)
            return _spread(unit.keys, rows)

        sums = [
            tree_sum((unit.number, block(unit)) for unit in units) for units in self._plan.nodes
        ]
        pool.fill()
        return sums

    def _parts(self, q: Tensor, k: Tensor) -> list[HeadTile]:
        heads = k.shape[2]
        whole = HeadTile(slice(0, q.shape[0]), slice(0, q.shape[2]), slice(0, heads))
        if self._by_triton(q):
            return [whole]
        group = q.shape[2] // max(heads, 1)
        one = lambda i, size=1: slice(i * size, (i + 1) * size)  # noqa: E731
        return [
            HeadTile(one(i), one(head, group), one(head))
            for i in range(q.shape[0])
            for head in range(heads)
        ] or [whole]

    def _by_triton(self, q: Tensor) -> bool:
        return is_on_cuda(q) or self._options.backend == "triton"

    def _run(self, q: Tensor, jobs: Iterator[Callable[[], T]]) -> Iterator[T]:
        return (job() for job in jobs) if self._by_triton(q) else on_one_thread_each(jobs)

    def _pool(self, k: Tensor, v: Tensor) -> Pool:
        steps = self._keys.steps
        blocks = travelling_keys(self._comm, steps, (k, v), self._label, len(steps))
        return Pool(self._plan, blocks, k, v)

    def _return(self, sums: list[SumBlock], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Send the sums to the ranks that hold the keys. Return dk and dv of the keys of this
        rank.
        """
        (batch, tokens, heads, _), rank = k.shape, self._comm.rank
        dims, dtype = [k.shape[3], v.shape[3]], accumulator_dtype(k.dtype)
        row = batch, heads, sum(dims)
        parts = [
            [_rows_of(sums[share.node], share.places) for share in shares]
            for shares in self._plan.sent
        ]
        counts = [[x.places.count for x in shares] for shares in self._plan.received]
        received = [
            k.new_empty((0 if peer == rank else sum(count), *row), dtype=dtype)
            for peer, count in enumerate(counts)
        ]
        sends = [(x, torch.cat(parts[x]).contiguous()) for x in self._comm.peers if parts[x]]
        recvs = [(peer, received[peer]) for peer in self._comm.peers]
        step = len(self._keys.steps) + 1
        self._comm.exchange(sends, recvs, label=self._label, step=step).wait()
        del sends
        by_document: dict[int, list[tuple[int, SumBlock]]] = {}
        for peer, shares in enumerate(self._plan.received):
            split = parts[rank] if peer == rank else received[peer].split(counts[peer])
            for share, x in zip(shares, split, strict=True):
                blocks = by_document.setdefault(share.document, [])
                blocks.append((share.number, _at(share.places, x)))
        total = PackedGradients.over(k.new_empty(0, dtype=dtype), (tokens, batch, heads), dims)
        for blocks in by_document.values():
            block = tree_sum(sorted(blocks, key=lambda x: x[0]))
            total.packed[block.start : block.stop] = block.rows
        # Turns −0 into 0, as in layouts in which gradients of other ranks are added.
        total.packed.add_(0.0)
        return total.dk, total.dv

    def _move(self, x: Tensor, back: bool = False) -> Tensor:
        """Send rows (B, T_local, …) from the ranks that hold the rows to the ranks that compute
        them.

        A *tile* is a range of queries, and one rank computes all rows of a tile. With `back`, rows
        are sent in the other direction, back to the ranks that hold the rows.
        """
        if self._plan.moved is None:
            return x
        source, target, step = self._call.layout, self._tiled, 0
        if back:
            source, target, step = target, source, len(self._keys.steps) + 1
        moved = move(x.transpose(0, 1), source, target, self._comm, self._label, step)
        return moved.transpose(0, 1)

    def _output_to_tiles(self, output: OutputGradient, q: Tensor) -> tuple[OutputGradient, Tensor]:
        assert output.out is not None
        dlse = self._call.dlse_on_all_ranks(output.dlse, output.dout)
        if self._plan.moved is None:
            return replace(output, dlse=dlse), q
        dims = [q.shape[3], *2 * [output.dout.shape[3]]]
        rows = self._move(torch.cat([q, output.dout, output.out], -1))
        q, dout, out = rows.split_with_sizes(dims, -1)
        columns = [output.lse] if dlse is None else [output.lse, dlse]
        lse, *others = self._move(torch.stack(columns, -1)).unbind(-1)
        return OutputGradient(dout, out, lse, others[0] if others else None), q


class Pool:
    """The keys (B, Hkv, rows, D) and values (B, Hkv, rows, Dv) to which a rank's tiles attend."""

    def __init__(
        self, plan: TilePlan, blocks: Iterator[Sequence[Tensor]], k: Tensor, v: Tensor
    ) -> None:
        """Allocate the memory for keys and values.

        `blocks` yields this rank's own keys and values, and after that the keys and values that
        arrive.
        """
        rows = -(-plan.pool // _ROWS_ALIGNMENT) * _ROWS_ALIGNMENT
        make = torch.Tensor.new_zeros if plan.blank else torch.Tensor.new_empty
        shapes = [(k.shape[0], k.shape[2], rows, x.shape[3]) for x in (k, v)]
        self._tensors = [make(k, shape) for shape in shapes]
        self._blocks, self._remaining, self._arrived = blocks, iter(plan.arrivals), 0

    def fill(self, count: int | None = None) -> None:
        """Wait until the first `count` blocks of keys have arrived. None means all blocks."""
        while count is None or self._arrived < count:
            if (places := next(self._remaining, None)) is None:
                return
            for pool, x in zip(self._tensors, next(self._blocks), strict=True):
                by_heads, where = x.transpose(1, 2), places.local(pool.device)
                if isinstance(where, slice):
                    pool[:, :, where] = by_heads
                else:
                    pool.index_copy_(2, where, by_heads)
            self._arrived += 1

    def of_unit(self, unit: Unit, part: HeadTile) -> list[Tensor]:
        """Return k (b, m, h, D) and v (b, m, h, Dv) for the heads `part` of the tile `unit`.

        The keys of the tile must have arrived (`fill`).
        """
        result = []
        for x in self._tensors:
            ranges = [x[part.batch, part.kv_heads, keys] for keys in unit.keys]
            rows = ranges[0] if len(ranges) == 1 else torch.cat(ranges, 2)
            rows = rows if rows.data_ptr() % _ALIGNMENT == 0 else rows.clone()
            # Views can have different strides for dimensions of size 1.
            if rows.shape[:2] == (1, 1):
                rows = rows[0, 0][None, None]
            result.append(rows.transpose(1, 2))
        return result


def _rows_of(block: SumBlock, places: Rows) -> Tensor:
    """Return the rows of a block at the indices `places`. Index 0 is the first row of the whole
    sum.
    """
    where = places.local(block.rows.device)
    if isinstance(where, slice):
        return block.rows[where.start - block.start : where.stop - block.start]
    return block.rows.index_select(0, where - block.start)


def _at(places: Rows, rows: Tensor) -> SumBlock:
    """Return a block that has `rows` at the ascending indices `places`, and 0 between them."""
    (start, stop), where = places.reach, places.local(rows.device)
    if isinstance(where, slice):
        return SumBlock(start, rows)
    block = SumBlock(start, rows.new_zeros((stop - start, *rows.shape[1:])))
    block.rows.index_copy_(0, where - start, rows)
    return block


def _spread(keys: Sequence[slice], rows: Tensor) -> SumBlock:
    """Return a block that has `rows` in the ascending ranges `keys`, and 0 between the ranges."""
    start, stop = keys[0].start, keys[-1].stop
    if len(keys) == 1:
        return SumBlock(start, rows)
    block = SumBlock(start, rows.new_zeros((stop - start, *rows.shape[1:])))
    for x, part in zip(keys, rows.split([x.stop - x.start for x in keys]), strict=True):
        block.rows[x.start - start : x.stop - start] = part
    return block


# Each tile contributes to dk and dv of the keys to which it attends. The contributions to a
# document's keys are added along a binary tree of the tiles' numbers: first tiles 2i and 2i + 1,
# then two such pairs, and so on. Tiles without contributions are left out. The order does not
# depend on the layout. A rank adds the subtrees whose tiles it computes, and the rank that holds
# the keys adds the rest.


class SumBlock(NamedTuple):
    """The rows (n, …) of a sum from row `start` on. All rows of the sum outside the block are 0.

    Adding two blocks may overwrite their tensors.
    """

    start: int
    rows: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


def tree_sum(contributions: Iterable[tuple[int, SumBlock]]) -> SumBlock:
    """Add one or more blocks of gradients along a fixed binary tree, and return the sum.

    Each leaf of the tree is the gradient from one range of queries, called a *tile*. A block is the
    sum of one leaf, or of all leaves of a complete subtree. `contributions` has pairs (index of one
    of the block's tiles, block), in ascending order of the index.
    """
    waiting = list[tuple[int, SumBlock]]()
    for number, block in contributions:
        while len(waiting) > 1 and _height(*waiting[-2:]) < _height(waiting[-1], (number, block)):
            _add_last_two(waiting)
        waiting.append((number, block))
        del block
    while len(waiting) > 1:
        _add_last_two(waiting)
    return waiting[0][1]


def _height(one: tuple[int, SumBlock], other: tuple[int, SumBlock]) -> int:
    return (one[0] ^ other[0]).bit_length()


def _add_last_two(waiting: list[tuple[int, SumBlock]]) -> None:
    number, last = waiting.pop()
    waiting[-1] = number, _sum(waiting[-1][1], last)


def _sum(one: SumBlock, other: SumBlock) -> SumBlock:
    for into, block in ((other, one), (one, other)):
        if into.start <= block.start and block.stop <= into.stop:
            first = block.start - into.start
            into.rows[first : first + len(block.rows)] += block.rows
            return into
    start, stop = min(one.start, other.start), max(one.stop, other.stop)
    total = SumBlock(start, one.rows.new_zeros((stop - start, *one.rows.shape[1:])))
    for block in (one, other):
        first = block.start - start
        total.rows[first : first + len(block.rows)] += block.rows
    return total


# ATen and the libraries that it uses divide a matrix product among threads, and add the parts in an
# order that depends on the number of threads. On one thread, operands with the same shapes, strides
# and alignment give the same bits. To use all cores, several computations therefore run at the same
# time, each on one thread.
def on_one_thread_each(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Run each job on one torch thread, and yield the results in the order of the jobs.

    A job is a function that does not depend on the other jobs. If the caller has t torch threads, t
    jobs run at the same time, and at most t finished results are in memory.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        for job in jobs:
            yield job()
        return
    workers = _workers(os.getpid(), threads)
    pending = deque[Future[T]]()
    try:
        for job in jobs:
            pending.append(workers.submit(in_this_mode(job)))
            del job  # frees the tensors to which the job refers
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


@cache
def _workers(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the threads that compute in a process. A forked process gets new threads."""
    return ThreadPoolExecutor(threads, "seqpar one thread", set_own_threads, (1,))
