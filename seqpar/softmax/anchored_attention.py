"""Compute tiles of queries whole, so that bits do not depend on ranks or on their layout.

A backend is called for one tile at a time, always with tensors of the same shapes, in the same
memory format, over the same slices. What is merged, or applied to out, is of operations whose bits
do not depend on an element's place in a tensor.

Legend: B batch, n rows of a tile, m keys that it sees, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from seqpar.comm.exchange import Comm
from seqpar.dtypes import accumulator_dtype
from seqpar.layout.geometry import Geometry
from seqpar.layout.remap import move
from seqpar.softmax.anchored_plan import TilePlan, Unit
from seqpar.softmax.attend import attend, attend_backward
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.key_exchange import travelling_keys
from seqpar.softmax.key_plan import Distances, KeyPlan
from seqpar.softmax.partial import Gradients, OutputGradient, PackedGradients, Partial
from seqpar.softmax.rows import Rows
from seqpar.softmax.strategy import ForwardResult
from seqpar.softmax.tree_sum import Block, tree_sum

_LINE = 64  # bytes of a cache line, at multiples of which keys begin
_ROWS = 64  # heads of keys begin at multiples of so many rows, and so of a line


class TileCall:
    """A call on one rank, whose tiles are computed whole."""

    def __init__(self, comm: Comm, call: ResolvedCall, distances: Distances, label: str) -> None:
        """Exchange keys over these distances, all at once; `label` names the messages.

        Posted step by step, keys would wait for the compute of ranks that need others.
        """
        self._comm, self._call, self._label = comm, call, label
        self._plan = call.once(("tile plan", distances), lambda: TilePlan.of(call, distances))
        self._tiled = self._plan.moved or call.layout
        tiled = call.altered(layout=self._tiled)
        self._keys = tiled.once(("keys", distances), lambda: KeyPlan.of(tiled, distances))
        self._options = replace(call.options, anchored=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> ForwardResult:
        """Return the attention of this rank's queries over the keys of all ranks."""
        q = self._to_tiles(q)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulator_dtype(q.dtype))
        pool = self._pool(k, v)
        for _, units in self._plan.nodes:
            for unit in units:
                keys, values = pool.of_unit(unit)
                queries = _by_heads(q[:, unit.rows])
                partial = Partial.nothing(queries, values, anchored=True)
                operands = queries, keys, values, unit.slices, partial
                attend(*operands, self._options, self._call.max_logits)
                results = partial.finish(self._call.sinks, q.dtype)
                out[:, unit.rows], lse[:, unit.rows] = results
        pool.fill()  # all messages, also where no tile needs them
        return ForwardResult(self._to_owners(out), self._to_owners(lse), [])

    def gradients(
        self, output: OutputGradient, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of this rank's tokens, in fp32 (fp64 for fp64)."""
        output, q = self._output_to_tiles(output, q)
        dq = q.new_zeros(q.shape, dtype=accumulator_dtype(q.dtype))
        pool = self._pool(k, v)
        sums = [
            tree_sum((unit.number, self._of_unit(unit, output, q, dq, pool)) for unit in units)
            for _, units in self._plan.nodes
        ]
        pool.fill()
        del pool
        dk, dv = self._return(sums, k, v)
        return self._to_owners(dq), dk, dv

    def _of_unit(
        self, unit: Unit, output: OutputGradient, q: Tensor, dq: Tensor, pool: Pool
    ) -> Block:
        """Write a unit's dq, and return its contribution to dk and dv of the pool."""
        assert output.out is not None
        keys, values = pool.of_unit(unit)
        rows = unit.rows
        queries, dout, out, lse = (
            _by_heads(x[:, rows]) for x in (q, output.dout, output.out, output.lse)
        )
        dlse = None if output.dlse is None else _by_heads(output.dlse[:, rows])
        found = Gradients.zeros(queries, keys, values)
        operands = OutputGradient(dout, out, lse, dlse), queries, keys, values
        attend_backward(*operands, unit.slices, found, self._options)
        dq[:, rows] = found.dq
        return _spread(unit.keys, found.packed)

    def _pool(self, k: Tensor, v: Tensor) -> Pool:
        plan = self._keys
        blocks = travelling_keys(self._comm, plan, k, v, self._label, len(plan.steps))
        return Pool(self._plan, blocks, k, v)

    def _return(self, sums: list[Block], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Send sums of the pool's gradients to the keys' owners; return dk and dv of own keys."""
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
        by_document: dict[int, list[tuple[int, Block]]] = {}
        for peer, shares in enumerate(self._plan.received):
            split = parts[rank] if peer == rank else received[peer].split(counts[peer])
            for share, x in zip(shares, split, strict=True):
                found = by_document.setdefault(share.document, [])
                found.append((share.number, _at(share.places, x)))
        total = PackedGradients.over(k.new_empty(0, dtype=dtype), (tokens, batch, heads), dims)
        for found in by_document.values():
            block = tree_sum(sorted(found, key=lambda x: x[0]))
            total.packed[block.start : block.stop] = block.rows
        total.packed += 0.0  # −0, of which a sum with nothing is 0, becomes 0
        return total.dk, total.dv

    def _to_tiles(self, x: Tensor) -> Tensor:
        """Return rows (B, T_local, …) of this rank's tiles, of those of its tokens."""
        return self._move(x, self._call.layout, self._tiled, 0)

    def _to_owners(self, x: Tensor) -> Tensor:
        """Undo it."""
        step = len(self._keys.steps) + 1
        return self._move(x, self._tiled, self._call.layout, step)

    def _move(self, x: Tensor, source: Geometry, target: Geometry, step: int) -> Tensor:
        if self._plan.moved is None:
            return x
        moved = move(x.transpose(0, 1), source, target, self._comm, self._label, step)
        return moved.transpose(0, 1)

    def _output_to_tiles(self, output: OutputGradient, q: Tensor) -> tuple[OutputGradient, Tensor]:
        """Return what flows into the rank's tiles, and their queries."""
        assert output.out is not None
        dlse = self._call.dlse_on_all_ranks(output.dlse, output.dout)
        if self._plan.moved is None:
            return replace(output, dlse=dlse), q
        dims = [q.shape[3], *2 * [output.dout.shape[3]]]
        rows = self._to_tiles(torch.cat([q, output.dout, output.out], -1))
        q, dout, out = rows.split_with_sizes(dims, -1)
        columns = [output.lse] if dlse is None else [output.lse, dlse]
        lse, *others = self._to_tiles(torch.stack(columns, -1)).unbind(-1)
        return OutputGradient(dout, out, lse, others[0] if others else None), q


class Pool:
    """The keys and values that a rank's tiles see, as they arrive: (B, Hkv, rows, D and Dv)."""

    def __init__(
        self, plan: TilePlan, blocks: Iterator[Sequence[Tensor]], k: Tensor, v: Tensor
    ) -> None:
        """Fill it from blocks of keys and values, of which k and v are the first."""
        rows = -(-plan.pool // _ROWS) * _ROWS
        make = torch.Tensor.new_zeros if plan.blank else torch.Tensor.new_empty
        shapes = [(k.shape[0], k.shape[2], rows, x.shape[3]) for x in (k, v)]
        self._tensors = [make(k, shape) for shape in shapes]
        self._blocks, self._remaining, self._arrived = blocks, iter(plan.arrivals), 0

    def fill(self, count: int | None = None) -> None:
        """Wait for the first `count` blocks, or for all."""
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

    def of_unit(self, unit: Unit) -> list[Tensor]:
        """Return k (B, m, Hkv, D) and v (B, m, Hkv, Dv) of a unit, once they have arrived."""
        self.fill(unit.ready)
        parts = [[x[:, :, keys] for keys in unit.keys] for x in self._tensors]
        found = [x[0] if len(x) == 1 else torch.cat(x, 2) for x in parts]
        aligned = [x if x.data_ptr() % _LINE == 0 else x.clone() for x in found]
        return [x.transpose(1, 2) for x in aligned]


def _by_heads(x: Tensor) -> Tensor:
    """Return x (B, n, H, …) with the rows of a head together in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _rows_of(block: Block, places: Rows) -> Tensor:
    """Return those rows of a block that are at these places of the sum."""
    where = places.local(block.rows.device)
    if isinstance(where, slice):
        return block.rows[where.start - block.start : where.stop - block.start]
    return block.rows.index_select(0, where - block.start)


def _at(places: Rows, rows: Tensor) -> Block:
    """Return rows that go to these places, ascending, as a block."""
    (start, stop), where = places.reach, places.local(rows.device)
    if isinstance(where, slice):
        return Block(start, rows)
    block = Block(start, rows.new_zeros((stop - start, *rows.shape[1:])))
    block.rows.index_copy_(0, where - start, rows)
    return block


def _spread(keys: Sequence[slice], rows: Tensor) -> Block:
    """Return rows that go to these ranges, ascending, one after another, as a block."""
    start, stop = keys[0].start, keys[-1].stop
    if len(keys) == 1:
        return Block(start, rows)
    block = Block(start, rows.new_zeros((stop - start, *rows.shape[1:])))
    for x, part in zip(keys, rows.split([x.stop - x.start for x in keys]), strict=True):
        block.rows[x.start - start : x.stop - start] = part
    return block
