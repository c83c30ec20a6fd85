"""The base class of strategies whose ranks form a mesh and compute a tile of attention each.

A rank's tile is the queries of its row over the keys of its column. Subclasses choose the number of
columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import shown
from seqpar.core.dtypes import DTYPES, accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.softmax.attend import attend, attend_backward, attend_blocks
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import (
    OutputGradient,
    Partial,
    PartialGradients,
    QuerySums,
    Sums,
)
from seqpar.softmax.keys.key_exchange import GradientReturn, travelling_keys
from seqpar.softmax.queries.query_exchange import (
    HopMessages,
    QueryExchange,
    QuerySchedule,
    packs_all_rows,
    query_groups,
)
from seqpar.softmax.queries.tiles import Tile, Tiles
from seqpar.softmax.strategy import ForwardResult, Gradients, Strategy
from seqpar.softmax.wire.message_dtypes import (
    CODES,
    check_gradient_digits,
    check_gradient_dtype,
    decode_rows,
    encode_rows,
    encoded_width,
)
from seqpar.softmax.wire.row_messages import RowFormat, add_rows


@dataclass(frozen=True)
class TileStrategy(Strategy):
    """Queries travel to the other ranks of their row and results return; keys travel in columns.

    A rank first computes with its own queries while the keys of its column arrive; these stay until
    the pass ends. Then it computes with the queries of one sender after another. It leaves some of
    its own work for the end, to overlap with the last messages.
    """

    partial_dtype: torch.dtype | None = None  # of outputs that return; None is the accumulator's
    # of dq that returns, and of dk and dv: None is the accumulator's, or bf16
    gradient_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        dtype, allowed = self.partial_dtype, (*DTYPES, *CODES)
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in allowed):
            expected = f"None or one of {allowed}"
            raise ValueError(f"partial_dtype must be {expected}, got {shown(dtype)}")
        check_gradient_dtype(self.gradient_dtype)

    def check(self, call: ResolvedCall) -> None:
        check_gradient_digits(self.gradient_dtype, call.shape.dtype)
        if self.partial_code and call.shape.dtype == torch.float64:
            refused = f"partial_dtype must not be {self.partial_code} with fp64"
            raise ValueError(f"{refused}, whose digits 8 bits would lose")

    @property
    def partial_code(self) -> torch.dtype | None:
        """The dtype of the 8-bit codes of outputs that return, or None if they have more bits."""
        return self.partial_dtype if self.partial_dtype in CODES else None

    @property
    def keys_dtype(self) -> torch.dtype | None:
        """The dtype of keys and values in messages: None for their own dtype, or 8 bits."""
        return None

    def columns_of(self, call: ResolvedCall) -> int:
        raise NotImplementedError

    def tiles(self, call: ResolvedCall) -> Tiles:
        return Tiles(call.layout, call.kv_layout, call.mask, self.columns_of(call))

    def plan(
        self,
        comm: Comm,
        call: ResolvedCall,
        travelling: Sequence[RowFormat],
        results: Sequence[RowFormat],
    ) -> tuple[Tile, QuerySchedule]:
        """Return this rank's tile, and the schedule by which tensors of these formats travel.

        Both are made once for all calls that differ only in their tensors.
        """
        columns, routed = self.columns_of(call), comm.is_routed
        tile = call.once(("tile", columns, routed), lambda: Tile(call, self.tiles(call), routed))
        key = "query schedule", columns, routed, tuple(travelling), tuple(results)

        def build() -> QuerySchedule:
            return QuerySchedule.of(call, tile.query_hops, tile.last_step, travelling, results)

        return tile, call.once(key, build)

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        q, k, v, sinks = operands
        label, accumulator = f"{self.name} forward", accumulator_dtype(q.dtype)
        dims, code = [v.shape[-1]], self.partial_code
        width = encoded_width(dims) if code else dims[0]
        query_format = RowFormat((q.shape[-1],), q.dtype)
        out_format = RowFormat((width,), torch.int8 if code else self.partial_dtype or accumulator)
        tile, schedule = self.plan(
            comm, call, [query_format], [out_format, RowFormat((), accumulator)]
        )
        total, groups = Partial.nothing(q, v), schedule.groups
        steps = tile.steps
        travelling = travelling_keys(comm, steps, (k, v), label, len(steps), self.keys_dtype)
        # The first `next` posts the exchanges of all steps.
        arriving: Iterator[Sequence[Tensor]] = chain([next(travelling)], travelling)
        blocks: list[Sequence[Tensor]] = []
        totals: list[Partial] = []  # for each group of heads
        keys: list[list[list[Tensor]]] = []  # for each group of heads, k and v of each block

        def compute_first() -> None:
            for i, block in enumerate(arriving):
                if (slices := tile.first(i)) is not None:
                    attend(q, block[0], block[1], slices, total, call.options, call.max_logits)
                blocks.append(block)
            for heads in groups:
                totals.append(total.of_heads(heads.queries))
                keys.append([[x[:, :, heads.keys] for x in block] for block in blocks])

        def compute_last() -> None:
            i, slices = tile.last
            k_block, v_block = blocks[i]
            attend(q, k_block, v_block, slices, total, call.options, call.max_logits)

        def compute(messages: HopMessages, received: list[Tensor], leaving: list[Tensor]) -> None:
            hop_blocks, (out, lse) = messages.hop.blocks, leaving
            assert hop_blocks is not None
            heads = groups[messages.group].queries
            options = call.options.of_heads(heads)
            max_logits = None if call.max_logits is None else call.max_logits.of_heads(heads)
            into = (lse.new_empty((*out.shape[:-1], *dims)) if code else out), lse
            block_keys = keys[messages.group]
            attend_blocks(received[0], block_keys, hop_blocks, options, None, into, max_logits)
            if code:
                encode_rows(into[:1], None, code, out)

        queries = QueryExchange(comm, schedule, [q], label)
        for group, rows, (out, lse) in queries.results(compute_first, compute_last, compute):
            if code:
                (out,) = decode_rows(out, dims, code, accumulator)
            totals[group].merge(rows, out, lse)  # at once: later messages reuse the memory
            total.empty = False  # for the second half of this rank's own slices
            del out, lse  # before the next hop is computed
        return ForwardResult(*total.finish(sinks, q.dtype), [])

    def gradients(
        self, comm: Comm, call: ResolvedCall, output: OutputGradient, operands: Operands
    ) -> Gradients:
        q, k, v, _ = operands
        label, dlse = f"{self.name} backward", call.dlse_on_all_ranks(output.dlse, output.dout)
        total = PartialGradients.zeros(q, k, v)
        columns = [output.lse, output.ensure_delta(), *([] if dlse is None else [dlse])]
        travelling = [q, output.dout, torch.stack(columns, -1)]
        formats = [RowFormat(tuple(x.shape[3:]), x.dtype, x is travelling[2]) for x in travelling]
        accumulator = accumulator_dtype(q.dtype)
        sent = self.gradient_dtype or accumulator
        tile, schedule = self.plan(comm, call, formats, [RowFormat((q.shape[-1],), sent)])
        groups, steps = schedule.groups, tile.steps
        arriving = travelling_keys(comm, steps, (k, v), label, len(steps), self.keys_dtype)
        blocks, gradients = [next(arriving)], [total]
        totals: list[Tensor] = []  # for each group of heads, dq
        keys: list[list[list[Tensor]]] = []  # for each group of heads, each block's k, v, dk and dv
        returning: list[GradientReturn] = []

        def compute_first() -> None:
            attend_backward(output, q, k, v, tile.own[0][0], total, call.options)
            for block, (first, _) in zip(arriving, tile.own[1:], strict=True):
                gradients.append(total.of_block(block[0], block[1]))
                attend_backward(output, q, block[0], block[1], first, gradients[-1], call.options)
                blocks.append(block)
            for heads in groups:
                tensors = [
                    (*block, own.dk, own.dv) for block, own in zip(blocks, gradients, strict=True)
                ]
                totals.append(total.dq[:, :, heads.queries])
                keys.append([[x[:, :, heads.keys] for x in block] for block in tensors])

        def compute_last() -> None:
            keys.clear()
            for step, (_, last) in zip(steps, tile.own[1:], strict=True):
                (k_block, v_block), own = blocks.pop(1), gradients.pop(1)
                attend_backward(output, q, k_block, v_block, last, own, call.options)
                message = own.message(sent) if step.travels else None
                returning.append(GradientReturn(comm, label, step, message))
            attend_backward(output, q, k, v, tile.own[0][1], total, call.options)

        def compute(messages: HopMessages, received: list[Tensor], results: list[Tensor]) -> None:
            hop_blocks, (leaving,) = messages.hop.blocks, results
            assert hop_blocks is not None
            q_block, dout_block, statistics = received
            lse_block, delta, *dlse_block = statistics.unbind(-1)
            received_output = output.received(
                dout_block, lse_block, delta, dlse_block[0] if dlse_block else None
            )
            queries = QuerySums(leaving, accumulator, leaving)
            options = call.options.of_heads(groups[messages.group].queries)
            block_keys = zip(keys[messages.group], hop_blocks.slices, strict=True)
            for (k_part, v_part, dk, dv), slices in block_keys:
                sums = PartialGradients(queries, Sums.of(dk, dv))
                attend_backward(received_output, q_block, k_part, v_part, slices, sums, options)
            queries.finish(leaving)

        exchange = QueryExchange(comm, schedule, travelling, label)
        for group, rows, (dq,) in exchange.results(compute_first, compute_last, compute):
            add_rows(dq, totals[group], rows.local(q.device))
            del dq
        for returned in returning:
            returned.add_to(total)
        return total.results()

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        tiles = self.tiles(call)
        sources = [rank, *reversed(tiles.column(rank))]
        own = [tiles.area(rank, source) for source in sources]
        received = [
            sum(tiles.area(sender, source) for source in sources)
            for sender in reversed(tiles.row(rank))
        ]
        return [area * call.shape.heads for area in (*own, *received)]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        shape, tiles = call.shape, self.tiles(call)
        element, accumulator = shape.dtype.itemsize, accumulator_dtype(shape.dtype).itemsize
        gradient = self.gradient_dtype.itemsize if self.gradient_dtype else accumulator
        rows, groups = list[Traffic](), len(query_groups(call))
        row, column = tiles.row(rank), tiles.column(rank)
        kv_heads, dims = shape.batch * shape.kv_heads, (shape.dim, shape.value_dim)
        key_size = encoded_width(dims) if self.keys_dtype else sum(dims) * element
        if column:
            sent, received = tiles.sent_keys(rank).counts, tiles.received_keys(rank)
            for step, (receiver, owner) in enumerate(zip(column, reversed(column), strict=True), 1):
                keys = int(sent[tiles.row_number(receiver)]) * kv_heads * key_size
                rows += [Traffic(x, step, receiver, 1, keys) for x in ("forward", "backward")]
                returned = int(received[owner]) * kv_heads * sum(dims) * gradient
                rows.append(Traffic("backward", step, owner, 1, returned))
        if not row:
            return rows
        partial = partial_bytes(shape, self.partial_dtype)
        statistics = (2 + call.return_lse) * accumulator
        sent_size = (shape.dim + shape.value_dim) * element + statistics
        # For each direction: messages of queries; bytes per row and head of queries and of results.
        sizes = {
            "forward": (1, shape.dim * element, partial + accumulator),
            "backward": (3, sent_size, shape.dim * gradient),
        }
        reached, arriving = tiles.sent_queries(rank), tiles.received_queries(rank)
        unpacked, heads = reached.are_ranges & ~packs_all_rows(call), shape.batch * shape.heads
        first_step = len(column) + 1
        for step, (receiver, sender) in enumerate(zip(row, reversed(row), strict=True), first_step):
            number = tiles.column_number(receiver)
            leaving, received_rows = int(reached.counts[number]), int(arriving[sender])
            for direction, (tensors, query_size, result_size) in sizes.items():
                messages = tensors if unpacked[number] else groups
                total = leaving * heads * query_size
                rows.append(Traffic(direction, step, receiver, messages, total))
                total = received_rows * heads * result_size
                rows.append(Traffic(direction, step, sender, groups, total))
        return rows


def partial_bytes(shape: OperandShape, partial_dtype: torch.dtype | None) -> int:
    """Return the bytes of a row and head of a travelling partial output, without its lse."""
    if partial_dtype in CODES:
        return encoded_width([shape.value_dim])
    return shape.value_dim * (partial_dtype or accumulator_dtype(shape.dtype)).itemsize
