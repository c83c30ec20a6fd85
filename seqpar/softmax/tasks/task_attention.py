"""Attention by tasks, in two parts: post all rows, then compute.

The rank computes half of its local work (own queries over own keys) while rows travel. In each
stage it computes foreign queries and returns their results immediately, then its own queries over
the foreign keys that have arrived. It computes the other half of its local work while the last
results return.

In one stage, a rank would wait for all keys before it computes. Each stage has keys evenly from all
owners: if a stage's keys were cut by position, few owners would send while the others wait, twice
the time on 8 zigzag ranks where links are the limit. A server spreads its own work over the stages.
Done in the first possible stage, that work delayed later results and gradients, and a step took
1.10 times as long (4 emulated ranks, documents in order, 1 Gbit/s).

Messages are (n, B, H, …): n rows, B batch, H heads. Rows come first, so messages from several ranks
are parts of one block, and the tensor that a backend takes, (B, n, H, …), is a view of the block.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Message
from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.tasks.task_rows import ServerRows
from seqpar.softmax.attend import attend, attend_backward, attend_blocks
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import (
    OutputGradient,
    PackedGradients,
    Partial,
    PartialGradients,
    Sums,
)
from seqpar.softmax.keys.key_plan import HeadSlices, gradients_by_group
from seqpar.softmax.strategy import ForwardResult, Gradients
from seqpar.softmax.tasks.task_plan import Sent, Shipment, TaskPlan, TaskStage
from seqpar.softmax.wire.message_buffers import MessageBuffers
from seqpar.softmax.wire.row_messages import Rows

Packed = dict[tuple[int, int], Tensor]  # (id of the rows, id of the tensors) -> message


class Returning:
    """Results that are under way to this rank, each with its rows."""

    def __init__(self, parts: list[tuple[Rows, Tensor]], pending: Pending) -> None:
        self._parts, self._pending = parts, pending

    def wait(self) -> Iterator[tuple[Rows, Tensor]]:
        """Wait for the results; yield them in the order of their servers, freeing each."""
        self._pending.wait()
        self._parts.reverse()
        while self._parts:
            yield self._parts.pop()


class TaskBuffers(NamedTuple):
    """The memory into which a pass receives foreign rows, in one or more groups of heads."""

    queries: list[MessageBuffers]  # for each block of queries
    keys: MessageBuffers

    @classmethod
    def of(
        cls, plan: TaskPlan, groups: int, live: int, queries: Sequence[int], keys: int
    ) -> TaskBuffers:
        """Return the buffers of a pass of this number of groups.

        At any time, at most `live` groups have posted their exchange and have foreign rows that are
        still to be computed. In the largest group, `queries` are the elements of a row of each
        block of queries, and `keys` those of a row of keys.
        """
        return cls(
            [MessageBuffers(live, [plan.foreign_queries * x] * groups) for x in queries],
            MessageBuffers(live, [plan.foreign_keys * keys] * groups),
        )


class TaskExchange:
    """The messages of a pass. The constructor posts all messages to servers."""

    def __init__(
        self,
        comm: Comm,
        plan: TaskPlan,
        label: str,
        queries: Sequence[Sequence[Tensor]],
        keys: Sequence[Tensor],
        buffers: TaskBuffers,
        kept: Tensor | None = None,
    ) -> None:
        """Post the sends and receives of all stages. `label` names them in errors and traces.

        The tensors (B, T, H, D) of one group of `queries` share a message, and so do the `keys`, k
        and v. `buffers` are those of the pass. `kept` is the block of foreign keys that servers
        kept in forward; with it, no keys travel.
        """
        # A separate channel: in the same communicator, results would wait for later stages' rows.
        self.plan, self._label, self._results = plan, label, comm.channel("results")
        # One block (n, B, Hq, …) per group of tensors that travel with queries, and one block
        # (n, B, Hkv, D + Dv) of keys and values.
        self.foreign_queries = [
            _block(plan.foreign_queries, group, memory)
            for group, memory in zip(queries, buffers.queries, strict=True)
        ]
        self.foreign_keys = _block(plan.foreign_keys, keys, buffers.keys) if kept is None else kept
        self._pending = list[Pending]()
        for stage in plan.stages:
            moving = [
                (stage.queries, group, block)
                for group, block in zip(queries, self.foreign_queries, strict=True)
            ]
            if kept is None:
                moving += [(shipment, keys, self.foreign_keys) for shipment in stage.keys]
            sends, recvs = list[Message](), list[Message]()
            packed: Packed = {}
            for shipment, tensors, block in moving:
                sends += _packed(shipment.sent, tensors, packed)
                recvs += _messages(shipment.block, block[shipment.rows])
            self._pending.append(comm.exchange(sends, recvs, label=label, step=stage.number))

    def arrivals(self) -> Iterator[tuple[TaskStage, list[Tensor]]]:
        """Yield each stage when it has arrived, with the tensors (B, n, Hq, …) of its queries.

        All keys to which these queries attend have then arrived, too.
        """
        for stage, pending in zip(self.plan.stages, self._pending, strict=True):
            pending.wait()
            rows = stage.queries.rows
            yield stage, [block[rows].transpose(0, 1) for block in self.foreign_queries]

    def return_results(self, stage: TaskStage, results: Tensor) -> Returning:
        """Post the results (n, B, …) of foreign queries, and receives for this rank's results."""
        return self._return(stage, [(stage.queries, results)])

    def return_gradients(self, stage: TaskStage, gradients: Tensor) -> Returning:
        """Post gradients of foreign keys, and receives for the gradients of this rank's keys.

        `gradients` belong to the block of all foreign keys. Those of keys that no later stage needs
        return.
        """
        return self._return(stage, [(x, gradients[x.rows]) for x in stage.done])

    def release(self) -> list[Tensor]:
        """Return the blocks of foreign queries and keys, and drop this object's references."""
        blocks = [*self.foreign_queries, self.foreign_keys]
        del self.foreign_queries, self.foreign_keys
        return blocks

    def _return(self, stage: TaskStage, moving: Sequence[tuple[Shipment, Tensor]]) -> Returning:
        sends, recvs, returning = list[Message](), list[Message](), list[tuple[Rows, Tensor]]()
        if moving:
            (_, x), count = moving[0], _sent_rows([shipment for shipment, _ in moving])
            memory = x.new_empty((count, *x.shape[1:]))
        for shipment, block in moving:
            sends += _messages(shipment.block, block)
            for peer, rows in shipment.sent:
                arriving, memory = memory[: rows.count], memory[rows.count :]
                recvs.append((peer, arriving))
                returning.append((rows, arriving))
        pending = self._results.exchange(sends, recvs, label=self._label, step=stage.number)
        return Returning(returning, pending)


class GroupExchanges:
    """The exchanges of a pass whose heads travel in groups.

    Unless all exchanges are posted at once, an exchange is posted while the group before is
    computed, so the messages of at most two groups exist at the same time. All ranks have the same
    groups, so they post the same exchanges in the same order.
    """

    def __init__(
        self,
        groups: list[HeadSlices],
        post: Callable[[HeadSlices], TaskExchange],
        at_once: bool,
    ) -> None:
        """Post the exchange of the first group or, with `at_once`, of all groups.

        `post` posts the exchange of a group and returns it.
        """
        self.groups, self._post = groups, post
        self._remaining, self._posted = iter(groups), deque[TaskExchange]()
        for _ in groups if at_once else groups[:1]:
            self.post_next()

    def post_next(self) -> None:
        """Post the exchange of the next group, if there is one that is not posted."""
        if (heads := next(self._remaining, None)) is not None:
            self._posted.append(self._post(heads))

    def take(self) -> TaskExchange:
        """Return the exchange of the next group, and drop this object's reference to it."""
        return self._posted.popleft()


def _sent_rows(shipments: Sequence[Shipment]) -> int:
    """Return how many rows this rank sends in these shipments."""
    return sum(rows.count for shipment in shipments for _, rows in shipment.sent)


def _block(rows: int, tensors: Sequence[Tensor], memory: MessageBuffers) -> Tensor:
    """Return memory (rows, B, H, ΣD) for rows of tensors (B, T, H, D), joined along D."""
    x, (batch, _, heads, _) = tensors[0], tensors[0].shape
    shape = rows, batch, heads, sum(x.shape[3] for x in tensors)
    return memory.take(math.prod(shape), x.dtype, x.device).view(shape)


def _packed(sent: Sequence[Sent], tensors: Sequence[Tensor], packed: Packed) -> list[Message]:
    """Return rows of the tensors as messages; several peers that get the same rows share a copy."""
    messages = list[Message]()
    for peer, rows in sent:
        key = id(rows), id(tensors)
        if key not in packed:
            packed[key] = rows.pack(*(x.transpose(0, 1) for x in tensors))
        messages.append((peer, packed[key]))
    return messages


def _messages(rows: ServerRows, block: Tensor) -> list[Message]:
    parts = block.split_with_sizes(rows.counts) if rows.counts else ()
    return list(zip(rows.ranks, parts, strict=True))


def complete_forward(
    exchange: TaskExchange, call: ResolvedCall, operands: Operands, keep: bool
) -> ForwardResult:
    """Return the result; with `keep`, its residuals are the blocks of foreign queries and keys."""
    (q, k, v, sinks), plan = operands, exchange.plan
    total = Partial.nothing(q, v)
    foreign_keys, returning = _split(exchange.foreign_keys, k, v), list[Returning]()
    attend(q, k, v, plan.first, total, call.options, call.max_logits)
    if not plan.sends_queries:  # the other half would hide no results
        attend(q, k, v, plan.last, total, call.options, call.max_logits)
    for stage, (queries,) in exchange.arrivals():
        results = _serve(queries, [(k, v), foreign_keys], stage, call)
        returning.append(exchange.return_results(stage, results))
        del queries, results
        keys, values = (x[:, stage.key_rows] for x in foreign_keys)
        attend(q, keys, values, stage.own, total, call.options, call.max_logits)
        del keys, values
    del foreign_keys
    received = exchange.release()
    if not keep:
        received.clear()  # frees the blocks before the next compute
    if plan.sends_queries:
        attend(q, k, v, plan.last, total, call.options, call.max_logits)
    for each in returning:
        for sent, results in each.wait():
            total.merge(sent, *_out_and_lse(results, q.shape[2]))
    return ForwardResult(*total.finish(sinks, q.dtype), received)


def complete_backward(
    posted: GroupExchanges,
    call: ResolvedCall,
    output: OutputGradient,
    operands: Operands,
    residuals: list[Tensor],
) -> Gradients:
    """Return dq, dk and dv, in the accumulator's dtype or in the dtypes of q, k and v.

    `residuals` are the blocks of queries and of keys that servers kept in forward, if any.
    """

    def add(
        heads: HeadSlices, output: OutputGradient, own: Operands, total: PackedGradients
    ) -> None:
        queries = residuals[0][:, :, heads.queries] if residuals else None
        of_group = call.with_heads_of(call, heads.queries)
        _add_gradients(posted, of_group, output, own, queries, total)

    return gradients_by_group(posted.groups, output, operands, add)


def _add_gradients(
    groups: GroupExchanges,
    call: ResolvedCall,
    output: OutputGradient,
    operands: Operands,
    kept_queries: Tensor | None,
    total: PackedGradients,
) -> None:
    """Add the gradients of the heads in `operands` to `total`.

    `kept_queries` is the block of foreign queries that this rank kept in forward, if any.
    """
    q, k, v, _ = operands
    posted = groups.take()
    plan = posted.plan
    foreign_keys = _split(posted.foreign_keys, k, v)
    foreign_sums = total.of_block(*foreign_keys)
    attend_backward(output, q, k, v, plan.first, total, call.options)
    blocks = [(k, v, total.dk, total.dv), (*foreign_keys, foreign_sums.dk, foreign_sums.dv)]
    returning, returning_keys = list[Returning](), list[Returning]()
    for stage, (rows, statistics) in posted.arrivals():
        kept = None
        if kept_queries is not None:
            kept = kept_queries[stage.queries.rows].transpose(0, 1)
        results = _serve_backward(output, kept, rows, statistics, blocks, stage, call)
        returning.append(posted.return_results(stage, results))
        del kept, rows, statistics, results
        keys, values, dk, dv = (x[:, stage.key_rows] for x in blocks[1])
        into = PartialGradients(total.queries, Sums.of(dk, dv))
        attend_backward(output, q, keys, values, stage.own, into, call.options)
        returning_keys.append(posted.return_gradients(stage, foreign_sums.packed))
        del keys, values, dk, dv, into
    posted.release()
    del foreign_keys, foreign_sums, blocks, posted
    groups.post_next()  # the compute of the next line also hides the next group's first messages
    attend_backward(output, q, k, v, plan.last, total, call.options)
    for each in returning:
        for sent, results in each.wait():
            sent.add(results, total.dq.transpose(0, 1))
    for each in returning_keys:
        for sent, results in each.wait():
            sent.add(results, total.packed)


def _serve(
    q: Tensor, blocks: list[tuple[Tensor, Tensor]], stage: TaskStage, call: ResolvedCall
) -> Tensor:
    """Return the results of a stage's foreign queries, (n, B, Hq·(Dv + 1)), in fp32 or fp64.

    `blocks` are this rank's k and v, and the foreign k and v.
    """
    batch, rows, heads, _ = q.shape
    shape = rows, batch, heads * (blocks[0][1].shape[3] + 1)
    results = q.new_empty(shape, dtype=accumulator_dtype(q.dtype))
    if len(results):
        into = _out_and_lse(results, heads)
        attend_blocks(q, blocks, stage.blocks, call.options, None, into, call.max_logits)
    return results


def _serve_backward(
    output: OutputGradient,
    q: Tensor | None,
    rows: Tensor,
    statistics: Tensor,
    blocks: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    stage: TaskStage,
    call: ResolvedCall,
) -> Tensor:
    """Return dq of a stage's foreign queries, (n, B, Hq, D); add to dk and dv of the blocks.

    `rows` have dout and, if q is None, then q. `statistics` are lse, delta and, if lse has a
    gradient, dlse. `output` is the output of this rank's own queries.
    """
    value_dim = blocks[0][1].shape[-1]
    q = rows[..., value_dim:] if q is None else q
    lse, delta, *dlse = statistics.unbind(-1)
    received = output.received(rows[..., :value_dim], lse, delta, dlse[0] if dlse else None)
    dq = lse.new_zeros((q.shape[1], q.shape[0], *q.shape[2:]))
    for (k, v, dk, dv), slices in zip(blocks, stage.blocks.slices, strict=True):
        into = PartialGradients.of(dq.transpose(0, 1), dk, dv)
        attend_backward(received, q, k, v, slices, into, call.options)
    return dq


def _split(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the views (B, n, Hkv, D) and (B, n, Hkv, Dv) of a block (n, B, Hkv, D + Dv)."""
    of_k, of_v = block.transpose(0, 1).split_with_sizes([k.shape[3], v.shape[3]], -1)
    return of_k, of_v


def _out_and_lse(results: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the views out (B, n, Hq, Dv) and lse (B, n, Hq) of results (n, B, Hq·(Dv + 1)).

    A row has the out of all heads first, then the lse, so that out is aligned for kernels.
    """
    sizes = [results.shape[2] - heads, heads]
    out, lse = results.transpose(0, 1).split_with_sizes(sizes, -1)
    return out.unflatten(-1, (heads, -1)), lse
