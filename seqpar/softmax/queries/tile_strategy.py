"""`TileStrategy`, the base class of TokenRing and Mesh.

The ranks form a mesh. Each rank computes attention of the queries of all ranks in its mesh row over
the keys of all ranks in its mesh column. This part of attention is the *tile* of the rank. A
subclass chooses the number of columns. In TokenRing, all ranks form one mesh row, so keys are not
sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from seqpar.softmax.compute.waiting_results import WaitingResults
from seqpar.softmax.keys.key_exchange import GradientReturn, travelling_keys
from seqpar.softmax.keys.key_plan import HeadSlices
from seqpar.softmax.queries.query_exchange import (
    HopMessages,
    QueryExchange,
    QuerySchedule,
    Travelling,
    packs_all_rows,
    query_groups,
)
from seqpar.softmax.queries.tiles import Tile, Tiles
from seqpar.softmax.result_dtypes import ResultDtypes, result_dtypes
from seqpar.softmax.strategy import ForwardResult, Gradients, Strategy
from seqpar.softmax.wire.message_dtypes import (
    CODES,
    check_gradient_digits,
    check_gradient_dtype,
    decode_rows,
    encode_rows,
    encoded_width,
)
from seqpar.softmax.wire.row_messages import RowFormat


@dataclass(frozen=True)
class TileStrategy(Strategy):
    """Sends queries to the other ranks of a mesh row, and keys to the other ranks of a mesh column.

    A rank first computes attention of its own queries, while it receives the keys of its mesh
    column. After that, the queries of the other ranks in its mesh row arrive, one rank after
    another. The rank computes attention of these queries and sends the results back. While the last
    results arrive, it computes the rest of the attention of its own queries.
    """

    # The dtype in which outputs return. None means the accumulator's dtype.
    partial_dtype: torch.dtype | None = None
    # The dtype in which dq, dk and dv return: bf16, or None for the accumulator's dtype.
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
        if self.partial_dtype == torch.float64 != call.shape.dtype:
            refused = f"partial_dtype must not be torch.float64 with {call.shape.dtype}"
            raise ValueError(f"{refused}, whose partial outputs are in torch.float32: use None")

    @property
    def partial_code(self) -> torch.dtype | None:
        """The 8-bit dtype in which outputs are sent back, or None if `partial_dtype` is not an
        8-bit dtype.
        """
        return self.partial_dtype if self.partial_dtype in CODES else None

    @property
    def keys_dtype(self) -> torch.dtype | None:
        """The 8-bit dtype in which keys and values are sent, or None for the dtype of k."""
        return None

    def _partial_dtypes(self, comm: Comm | None, call: ResolvedCall) -> ResultDtypes:
        chosen = torch.int8 if self.partial_code else self.partial_dtype
        return result_dtypes(comm, call, False, chosen)

    def columns_of(self, call: ResolvedCall) -> int:
        raise NotImplementedError

    def tiles(self, call: ResolvedCall) -> Tiles:
        return Tiles(call.layout, call.kv_layout, call.mask, self.columns_of(call))

    def plan(
        self,
        comm: Comm,
        call: ResolvedCall,
        travelling: Travelling,
    ) -> tuple[Tile, QuerySchedule]:
        """Return this rank's tile and the schedule of its messages.

        They are built once for all calls that differ only in their tensors.
        """
        columns, routed = self.columns_of(call), comm.is_routed
        tile = call.once(("tile", columns, routed), lambda: Tile(call, self.tiles(call), routed))
        key = "query schedule", columns, routed, travelling

        def build() -> QuerySchedule:
            counts = tile.last_step, tile.hop_count
            return QuerySchedule.of(call, tile.query_hops, *counts, travelling)

        return tile, call.once(key, build)

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        q, k, v, sinks = operands
        label, accumulator = f"{self.name} forward", accumulator_dtype(q.dtype)
        dims, code = [v.shape[-1]], self.partial_code
        width = encoded_width(dims) if code else dims[0]
        travelling = Travelling(
            (RowFormat((q.shape[-1],), q.dtype),),
            RowFormat((width,), accumulator),
            (RowFormat((), accumulator),),
            self._partial_dtypes(comm, call),
            backward=False,
        )
        tile, schedule = self.plan(comm, call, travelling)
        total, groups = Partial.nothing(q, v), schedule.groups
        steps = tile.steps
        exchanged = travelling_keys(comm, steps, (k, v), label, len(steps), self.keys_dtype)
        # This first `next` already posts the exchanges of all steps.
        arriving: Iterator[Sequence[Tensor]] = chain([next(exchanged)], exchanged)
        blocks: list[Sequence[Tensor]] = []
        keys: list[list[list[Tensor]]] = []  # for each group of heads, k and v of each block

        def compute_first() -> None:
            for i, block in enumerate(arriving):
                if (slices := tile.first(i)) is not None:
                    attend(q, block[0], block[1], slices, total, call.options, call.max_logits)
                blocks.append(block)
            for heads in groups:
                keys.append([[x[:, :, heads.keys] for x in block] for block in blocks])
            if not queries.keeps_results:
                total.allocate()

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

        parts = _parts(groups)
        total.divide(parts)
        queries = QueryExchange(comm, schedule, [q], label, _kept_bytes(total))
        results = queries.results(compute_first, compute_last, compute)
        for group, rows, (out, lse), is_last in results:
            if code:
                (out,) = decode_rows(out, dims, code, accumulator)
            total.merge(rows, out, lse, heads=parts[group])
            # The remaining slices of this rank's own queries are then merged, and do not overwrite
            # the results.
            total.empty = False
            del out, lse  # freed before the next hop is computed
            if is_last:
                total.add_up()
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
        dtypes = result_dtypes(comm, call, True, self.gradient_dtype)
        result = RowFormat((q.shape[-1],), accumulator)
        tile, schedule = self.plan(comm, call, Travelling(tuple(formats), result, (), dtypes, True))
        groups, steps = schedule.groups, tile.steps
        arriving = travelling_keys(comm, steps, (k, v), label, len(steps), self.keys_dtype)
        blocks, gradients = [next(arriving)], [total]
        keys: list[list[list[Tensor]]] = []  # for each group of heads, each block's k, v, dk and dv
        returning: list[GradientReturn] = []

        def compute_first() -> None:
            attend_backward(output, q, k, v, tile.own[0][0], total, call.options)
            for block, (first, _) in zip(arriving, tile.own[1:], strict=True):
                gradients.append(total.of_block(block[0], block[1]))
                attend_backward(output, q, block[0], block[1], first, gradients[-1], call.options)
                blocks.append(block)
            tensors = [
                (*block, own.dk, own.dv) for block, own in zip(blocks, gradients, strict=True)
            ]
            for heads in groups:
                keys.append([[x[:, :, heads.keys] for x in block] for block in tensors])
            if not exchange.keeps_results:
                total.queries.allocate()

        def compute_last() -> None:
            keys.clear()
            for step, (_, last) in zip(steps, tile.own[1:], strict=True):
                (k_block, v_block), own = blocks.pop(1), gradients.pop(1)
                attend_backward(output, q, k_block, v_block, last, own, call.options)
                message = own.message(dtypes.of_several) if step.travels else None
                returning.append(GradientReturn(comm, label, step, message, dtypes.of_several))
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

        parts = _parts(groups)
        total.queries.divide(parts)
        exchange = QueryExchange(comm, schedule, travelling, label, _kept_bytes(total.queries))
        results = exchange.results(compute_first, compute_last, compute)
        for group, rows, (dq,), is_last in results:
            total.queries.add(rows, dq, heads=parts[group], is_owned=False)
            del dq
            if is_last:
                total.queries.add_up()
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
        partials = self._partial_dtypes(None, call)
        gradients = result_dtypes(None, call, True, self.gradient_dtype)
        rows, groups = list[Traffic](), len(query_groups(call))
        row, column = tiles.row(rank), tiles.column(rank)
        kv_heads, dims = shape.batch * shape.kv_heads, (shape.dim, shape.value_dim)
        key_size = encoded_width(dims) if self.keys_dtype else sum(dims) * element
        if column:
            sent, received = tiles.sent_keys(rank).counts, tiles.received_keys(rank)
            for step, (receiver, owner) in enumerate(zip(column, reversed(column), strict=True), 1):
                keys = int(sent[tiles.row_number(receiver)]) * kv_heads * key_size
                rows += [Traffic(x, step, receiver, 1, keys) for x in ("forward", "backward")]
                returned = int(received[owner]) * kv_heads * sum(dims)
                returned *= gradients.of_several.itemsize
                rows.append(Traffic("backward", step, owner, 1, returned))
        if not row:
            return rows
        width = encoded_width([shape.value_dim]) if self.partial_code else shape.value_dim
        statistics = (2 + call.return_lse) * accumulator
        sent_size = (shape.dim + shape.value_dim) * element + statistics
        # For forward and backward: the number of messages of queries to a rank; then, per row and
        # head, the bytes of queries, the elements of results, the dtypes of results, and the bytes
        # of the tensors that return with results.
        sizes = {
            "forward": (1, shape.dim * element, width, partials, accumulator),
            "backward": (3, sent_size, shape.dim, gradients, 0),
        }
        reached, arriving = tiles.sent_queries(rank), tiles.received_queries(rank)
        unpacked, heads = reached.are_ranges & ~packs_all_rows(call), shape.batch * shape.heads
        first_step = len(column) + 1
        for step, (receiver, sender) in enumerate(zip(row, reversed(row), strict=True), first_step):
            number = tiles.column_number(receiver)
            leaving, received_rows = int(reached.counts[number]), int(arriving[sender])
            for direction, (tensors, query_size, elements, dtypes, others) in sizes.items():
                messages = tensors if unpacked[number] else groups
                total = leaving * heads * query_size
                rows.append(Traffic(direction, step, receiver, messages, total))
                backward = direction == "backward"
                is_one_call = partial(tiles.is_one_call, sender, rank, backward)
                size = elements * dtypes.of(is_one_call).itemsize if received_rows else 0
                total = received_rows * heads * (size + others)
                rows.append(Traffic(direction, step, sender, groups, total))
        return rows


def _kept_bytes(total: WaitingResults) -> int:
    """Return how many bytes of received results may be stored before they are merged."""
    # 4 bytes per element are for fp32 sums. The lse of a result has less than 1/16 of its bytes.
    return total.elements * (total.most_bytes - 4) * 17 // 16 if total.waits else 0


def _parts(groups: Sequence[HeadSlices]) -> list[slice | None]:
    return [None] if len(groups) == 1 else [heads.queries for heads in groups]


def partial_bytes(shape: OperandShape, partial_dtype: torch.dtype | None) -> int:
    """Return how many bytes of an output are sent back for each row and head, without the lse."""
    if partial_dtype in CODES:
        return encoded_width([shape.value_dim])
    return shape.value_dim * (partial_dtype or accumulator_dtype(shape.dtype)).itemsize
