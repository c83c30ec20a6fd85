"""Strategies in which a rank computes a tile: queries of its row over keys of its column.

They differ in how many columns the mesh of ranks has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import shown
from seqpar.core.dtypes import DTYPES, accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.softmax.attend import attend, attend_backward, attend_blocks
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients
from seqpar.softmax.keys.exchange import GradientReturn, travelling_keys
from seqpar.softmax.queries.exchange import Pass, QuerySchedule, Visit, are_packed, head_groups
from seqpar.softmax.queries.mesh_rows import Tiles
from seqpar.softmax.queries.tile import Tile
from seqpar.softmax.strategy import ForwardResult, Gradients, Strategy
from seqpar.softmax.wire.packing import RowFormat
from seqpar.softmax.wire.quantize import decode, encode, encoded_width
from seqpar.softmax.wire.row_messages import Rows


@dataclass(frozen=True)
class TileStrategy(Strategy):
    """Queries visit the ranks of their row, and their results return; keys go along their column.

    A rank first computes with its own queries, while its column's keys arrive, which stay until the
    pass is over; then with one guest after another. Some of its own work is left for last: it hides
    what leaves last.
    """

    partial_dtype: torch.dtype | None = None  # of outputs that return; None: the accumulator's

    def __post_init__(self) -> None:
        dtype, allowed = self.partial_dtype, (*DTYPES, torch.int8)
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in allowed):
            expected = f"None or one of {allowed}"
            raise ValueError(f"partial_dtype must be {expected}, got {shown(dtype)}")

    def check(self, call: ResolvedCall) -> None:
        if self.partial_dtype == torch.int8 and call.shape.dtype == torch.float64:
            raise ValueError("partial_dtype must not be int8 with fp64, whose digits it would lose")

    @property
    def keys_dtype(self) -> torch.dtype | None:
        """What keys and values travel in: None, their own dtype, or int8."""
        return None

    def columns_of(self, call: ResolvedCall) -> int:
        """Return how many columns the mesh of a call's ranks has."""
        raise NotImplementedError

    def tiles(self, call: ResolvedCall) -> Tiles:
        """Return the tiles of all ranks."""
        return Tiles(call.layout, call.kv_layout, call.mask, self.columns_of(call))

    def plan(
        self, call: ResolvedCall, travelling: Sequence[RowFormat], results: Sequence[RowFormat]
    ) -> tuple[Tile, QuerySchedule]:
        """Return this rank's tile, and the pass in which these tensors of queries visit others.

        Both are made once for all calls that differ in their tensors alone.
        """
        columns = self.columns_of(call)
        tile = call.once(("tile", columns), lambda: Tile.of(call, self.tiles(call)))
        key = "visits", columns, tuple(travelling), tuple(results)
        return tile, call.once(
            key, lambda: QuerySchedule.of(call, tile.meetings, travelling, results)
        )

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        q, k, v, sinks = operands
        label, accumulator = f"{self.name} forward", accumulator_dtype(q.dtype)
        dims, coded = [v.shape[-1]], self.partial_dtype == torch.int8
        width = encoded_width(dims) if coded else dims[0]
        out_kind = RowFormat((width,), self.partial_dtype or accumulator)
        kinds = [RowFormat((q.shape[-1],), q.dtype)], [out_kind, RowFormat((), accumulator)]
        tile, plan = self.plan(call, *kinds)
        total, groups = Partial.nothing(q, v), plan.groups
        totals = [total.of_heads(heads.queries) for heads in groups]
        steps = len(tile.keys.steps)
        arriving = travelling_keys(comm, tile.keys, k, v, label, steps, self.keys_dtype)
        arriving = chain([next(arriving)], arriving)  # which posts all of them
        blocks: list[Sequence[Tensor]] = []
        keys: list[list[list[Tensor]]] = []  # of each group of heads, each block's

        def compute_first() -> None:
            for i, block in enumerate(arriving):
                if (slices := tile.first(i)) is not None:
                    attend(q, block[0], block[1], slices, total, call.options, call.max_logits)
                blocks.append(block)
            for heads in groups:
                keys.append([[x[:, :, heads.keys] for x in block] for block in blocks])

        def compute_last() -> None:
            i, slices = tile.last
            k_block, v_block = blocks[i]
            attend(q, k_block, v_block, slices, total, call.options, call.max_logits)

        def compute(visit: Visit, guests: list[Tensor]) -> Tensor:
            assert visit.blocks is not None
            message, (out, lse) = visit.leaving.empty(q.device)
            heads = groups[visit.group].queries
            options = call.options.of_heads(heads)
            largest = None if call.max_logits is None else call.max_logits.of_heads(heads)
            here = keys[visit.group]
            into = (lse.new_empty((*out.shape[:-1], *dims)) if coded else out), lse
            attend_blocks(guests[0], here, visit.blocks, options, None, into, largest)
            if coded:
                out.copy_(encode(into[0], dims))
            return message

        travel = Pass(comm, plan, [q], label)
        for group, rows, (out, lse) in travel.results(compute_first, compute_last, compute):
            if coded:
                (out,) = decode(out, dims, accumulator)
            totals[group].merge(rows, out, lse)
            total.empty = False  # for the second half of this rank's own slices
            del out, lse  # before the next visit is computed
        return ForwardResult(*total.finish(sinks, q.dtype), [])

    def gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
    ) -> Gradients:
        q, k, v, _ = operands
        label, dlse = f"{self.name} backward", call.dlse_on_all_ranks(output.dlse, output.dout)
        total = PartialGradients.zeros(q, k, v)
        columns = [output.lse, output.ensure_delta(), *([] if dlse is None else [dlse])]
        travelling = [q, output.dout, torch.stack(columns, -1)]
        kinds = [RowFormat(tuple(x.shape[3:]), x.dtype, x is travelling[2]) for x in travelling]
        tile, plan = self.plan(call, kinds, [RowFormat((q.shape[-1],), total.dq.dtype)])
        groups, steps = plan.groups, tile.keys.steps
        totals = [total.dq[:, :, heads.queries] for heads in groups]
        arriving = travelling_keys(comm, tile.keys, k, v, label, len(steps), self.keys_dtype)
        blocks, gradients = [next(arriving)], [total]
        keys: list[list[list[Tensor]]] = []  # of each group of heads, each block's k, v, dk and dv
        returning: list[GradientReturn] = []

        def compute_first() -> None:
            attend_backward(output, q, k, v, tile.own[0][0], total, call.options)
            for step, block, (first, _) in zip(steps, arriving, tile.own[1:], strict=True):
                gradients.append(total.of_block(step.rows))
                attend_backward(output, q, block[0], block[1], first, gradients[-1], call.options)
                blocks.append(block)
            for heads in groups:
                tensors = [
                    (*block, own.dk, own.dv) for block, own in zip(blocks, gradients, strict=True)
                ]
                keys.append([[x[:, :, heads.keys] for x in block] for block in tensors])

        def compute_last() -> None:
            keys.clear()
            for step, (_, last) in zip(steps, tile.own[1:], strict=True):
                (k_block, v_block), own = blocks.pop(1), gradients.pop(1)
                attend_backward(output, q, k_block, v_block, last, own, call.options)
                packed = own.packed if step.travels else None
                returning.append(GradientReturn(comm, step, packed, label))
            attend_backward(output, q, k, v, tile.own[0][1], total, call.options)

        def compute(visit: Visit, guests: list[Tensor]) -> Tensor:
            assert visit.blocks is not None
            q_block, dout_block, statistics = guests
            lse_block, delta, *dlse_block = statistics.unbind(-1)
            visiting = OutputGradient(
                dout_block, None, lse_block, dlse_block[0] if dlse_block else None, delta
            )
            message, (dq,) = visit.leaving.empty(q.device)
            dq.zero_()
            options = call.options.of_heads(groups[visit.group].queries)
            here = zip(keys[visit.group], visit.blocks.slices, strict=True)
            for (k_part, v_part, dk, dv), slices in here:
                own = PartialGradients(dq, dk, dv)
                attend_backward(visiting, q_block, k_part, v_part, slices, own, options)
            return message

        travel = Pass(comm, plan, travelling, label)
        for group, rows, (dq,) in travel.results(compute_first, compute_last, compute):
            if isinstance(rows, slice):
                totals[group][:, rows].add_(dq)
            else:
                totals[group].index_add_(1, rows, dq)
            del dq
        for returned in returning:
            returned.add_to(total)
        return total.dq, total.dk, total.dv

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        tiles = self.tiles(call)
        sources = [rank, *reversed(tiles.column(rank))]
        own = [tiles.area(rank, source) for source in sources]
        guests = [
            sum(tiles.area(guest, source) for source in sources)
            for guest in reversed(tiles.row(rank))
        ]
        return [area * call.shape.heads for area in (*own, *guests)]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        s, tiles = call.shape, self.tiles(call)
        element, accumulator = s.dtype.itemsize, accumulator_dtype(s.dtype).itemsize
        rows, groups = [], len(head_groups(call))
        row, column = tiles.row(rank), tiles.column(rank)
        kv_heads, dims = s.batch * s.kv_heads, (s.dim, s.value_dim)
        of_key = encoded_width(dims) if self.keys_dtype == torch.int8 else sum(dims) * element
        for step, (host, owner) in enumerate(zip(column, reversed(column), strict=True), start=1):
            sent, received = Rows(tiles.seen(rank, host)), Rows(tiles.seen(owner, rank))
            keys = sent.count * kv_heads * of_key
            rows += [Traffic(x, step, host, 1, keys) for x in ("forward", "backward")]
            returned = received.count * kv_heads * sum(dims) * accumulator
            rows.append(Traffic("backward", step, owner, 1, returned))
        partial = s.value_dim * (self.partial_dtype or accumulator_dtype(s.dtype)).itemsize
        if self.partial_dtype == torch.int8:
            partial = encoded_width([s.value_dim])
        statistics = (2 + call.return_lse) * accumulator
        # For each direction: (messages, bytes for each row and head) of queries, and of results.
        sizes = {
            "forward": (1, s.dim * element, partial + accumulator),
            "backward": (3, (s.dim + s.value_dim) * element + statistics, s.dim * accumulator),
        }
        for step, (host, guest) in enumerate(zip(row, reversed(row), strict=True), len(column) + 1):
            away, here = Rows(tiles.seeing(rank, host)), Rows(tiles.seeing(guest, rank))
            for direction, (tensors, query, result) in sizes.items():
                messages = groups if are_packed(call, away) else tensors
                both = (host, away, messages, query), (guest, here, groups, result)
                for peer, moved, count, size in both:
                    total = moved.count * s.batch * s.heads * size
                    rows.append(Traffic(direction, step, peer, count, total))
        return rows
