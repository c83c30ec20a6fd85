"""Send rows to the ranks that compute tasks, compute these tasks, and send the results back.

A *task* is attention of some queries over some keys of one document. *Foreign* rows are rows of
other ranks. *Local* work is attention of a rank's own queries over its own keys. Rows are sent in
several *stages*. In forward, a rank does the following:

1. It posts the messages of all stages, and computes half of its local work.
2. When the rows of a stage have arrived, it computes attention of the foreign queries in this
   stage, and sends the results back. After that, it computes attention of its own queries over some
   of the foreign keys that have arrived.
3. After the last stage, it computes the second half of its local work, while the last results are
   sent back.

Each stage contains about the same number of keys from every rank. If a stage were a range of
positions instead, a few ranks would send while all other ranks wait. Attention of a rank's own
queries over foreign keys is distributed over the stages. If a rank computed this attention as early
as possible, it would send results and gradients later.

Messages are (n, B, H, …), with n rows, batch B and H heads. Backends receive them as views (B, n,
H, …).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
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
    """The results of this rank's rows that other ranks compute and send back to this rank."""

    def __init__(self, parts: list[tuple[Rows, Tensor]], pending: Pending) -> None:
        self._parts, self._pending = parts, pending

    def arrive(self) -> None:
        """Wait until the results of this rank's rows have arrived.

        The results that this rank sent in the same exchange are freed after that.
        """
        self._pending.wait()

    def wait(self) -> Iterator[tuple[Rows, Tensor]]:
        """Wait for all results. Yield each result with its rows, in an order that is always the
        same.

        A result is freed when the caller asks for the next result.
        """
        self.arrive()
        self._parts.reverse()
        while self._parts:
            yield self._parts.pop()


class TaskBuffers(NamedTuple):
    queries: list[MessageBuffers]  # one for each message of queries
    keys: MessageBuffers

    @classmethod
    def of(cls, plan: TaskPlan, groups: int, queries: Sequence[int], keys: int) -> TaskBuffers:
        """Return the memory for the rows of other ranks that arrive in a forward or backward.

        Heads are sent in groups. Each group uses the memory that the preceding group has released.

        Args:
            plan: this rank's plan.
            groups: the number of groups of heads.
            queries: for each message of queries, the number of elements of a row in the largest
                group.
            keys: the number of elements of a row of keys in the largest group.
        """
        return cls(
            [MessageBuffers(1, [plan.foreign_queries * x] * groups) for x in queries],
            MessageBuffers(1, [plan.foreign_keys * keys] * groups),
        )


class TaskExchange:
    """The messages of a forward or backward, for one group of heads.

    The constructor posts the messages with queries and keys. The messages with results are posted
    later.
    """

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
        """Post the sends and receives of rows. Rows are sent in several stages.

        Args:
            comm: the ranks of the call.
            plan: this rank's plan.
            label: the name of the messages in errors and traces.
            queries: lists of tensors (B, T, H, D) of this rank's queries. The tensors of one list
                share a message.
            keys: k and v, which share a message.
            buffers: the memory for the rows of other ranks.
            kept: the keys of other ranks that this rank kept in forward, or None. If keys were
                kept, no keys are sent.
        """
        # Results use a separate channel. In the same communicator, they would wait for the rows of
        # later stages.
        self.plan, self._label, self._results = plan, label, comm.channel("results")
        # One block (n, B, Hq, …) for each list of `queries`, and one block (n, B, Hkv, D + Dv) of
        # keys and values.
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
        """Yield each stage after its rows have arrived, with tensors (B, n, Hq, …) of foreign
        queries.

        The foreign keys to which these queries attend have also arrived.
        """
        for stage, pending in zip(self.plan.stages, self._pending, strict=True):
            pending.wait()
            rows = stage.queries.rows
            yield stage, [block[rows].transpose(0, 1) for block in self.foreign_queries]

    def return_results(self, stage: TaskStage, results: Tensor) -> Returning:
        """Send the results (n, B, …) of foreign queries, and post receives.

        The receives are for results of this rank's queries.
        """
        return self._return(stage, [(stage.queries, results)])

    def return_gradients(self, stage: TaskStage, gradients: Tensor) -> Returning:
        """Send gradients of foreign keys, and post receives for the gradients of this rank's keys.

        *Foreign* keys are keys of other ranks. `gradients` are the gradients of all foreign keys.
        This method sends only the gradients of those keys that no later stage needs.
        """
        return self._return(stage, [(x, gradients[x.rows]) for x in stage.done])

    def release(self) -> list[Tensor]:
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
    """The exchanges of a backward whose heads are sent in groups.

    The exchange of a group is posted while the preceding group is computed, or earlier. At most two
    groups of rows from other ranks are in memory at the same time. All ranks have the same groups.
    """

    def __init__(
        self,
        groups: list[HeadSlices],
        post: Callable[[HeadSlices], TaskExchange],
        ahead: int,
    ) -> None:
        """Post the exchanges of the first `ahead` groups.

        `post` posts the exchange of one group.
        """
        self.groups, self._post = groups, post
        self._remaining, self._posted = iter(groups), deque[TaskExchange]()
        self._posted.extend(map(post, islice(self._remaining, ahead)))

    def post_next(self) -> None:
        if not self._posted and (heads := next(self._remaining, None)) is not None:
            self._posted.append(self._post(heads))

    def take(self) -> TaskExchange:
        return self._posted.popleft()


def _sent_rows(shipments: Sequence[Shipment]) -> int:
    return sum(rows.count for shipment in shipments for _, rows in shipment.sent)


def _block(rows: int, tensors: Sequence[Tensor], memory: MessageBuffers) -> Tensor:
    x, (batch, _, heads, _) = tensors[0], tensors[0].shape
    shape = rows, batch, heads, sum(x.shape[3] for x in tensors)
    return memory.take(shape, x.dtype, x.device)


def _packed(sent: Sequence[Sent], tensors: Sequence[Tensor], packed: Packed) -> list[Message]:
    """Return messages with rows of the tensors.

    If several ranks need the same rows, their messages share memory.
    """
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
    """Compute a forward whose rows have been posted.

    With `keep`, the residuals are the foreign queries and the foreign keys.
    """
    (q, k, v, sinks), plan = operands, exchange.plan
    total = Partial.nothing(q, v)
    foreign_keys, returning = _split(exchange.foreign_keys, k, v), list[Returning]()
    attend(q, k, v, plan.first, total, call.options, call.max_logits)
    # Local work is divided only to hide the return of results. Here no results return.
    if not plan.sends_queries:
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
        received.clear()  # frees the foreign rows before the next computation
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
    """Compute dq, dk and dv of a backward whose rows have been posted.

    The gradients may be in the accumulator's dtype. The caller casts them to the dtypes of q, k and
    v. `residuals` are the queries and keys of other ranks that forward kept, or an empty list.
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
    """Add the gradients of one group of heads to `total`.

    `operands` are the operands of these heads. `kept_queries` are the foreign queries that this
    rank kept in forward, or None.
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
    # Frees the results that were sent in these stages, before the next group allocates memory.
    for each in returning[:-1]:
        each.arrive()
    groups.post_next()  # so that the next line also hides the first messages of the next group
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
    """Return the attention of the queries that arrived from other ranks in one stage.

    `blocks` are this rank's k and v, and the k and v that arrived from other ranks. The result (n,
    B, Hq·(Dv + 1)) contains out and lse in the accumulator's dtype.
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
    """Return dq (n, B, Hq, D) of the queries that arrived in one stage. Add to dk and dv in
    `blocks`.

    *Foreign* queries and keys are those that arrived from other ranks.

    Args:
        output: the output of this rank's own queries.
        q: the foreign queries that this rank kept in forward, or None.
        rows: dout of the foreign queries. If q is None, the tensor also contains the foreign
            queries, behind dout along the head dim.
        statistics: lse and delta, and dlse if lse has a gradient.
        blocks: two blocks of keys, this rank's keys and the foreign keys, with k, v, dk and dv of
            each.
        stage: the stage whose queries are computed.
        call: the call of attention.
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
    """Split k and v, (n, B, Hkv, D + Dv), into the views (B, n, Hkv, D) and (B, n, Hkv, Dv)."""
    of_k, of_v = block.transpose(0, 1).split_with_sizes([k.shape[3], v.shape[3]], -1)
    return of_k, of_v


def _out_and_lse(results: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Split results (n, B, Hq·(Dv + 1)) into the views out (B, n, Hq, Dv) and lse (B, n, Hq).

    Each row begins with the elements of `out` for all heads, so that `out` is aligned for kernels.
    The elements of `lse` follow.
    """
    sizes = [results.shape[2] - heads, heads]
    out, lse = results.transpose(0, 1).split_with_sizes(sizes, -1)
    return out.unflatten(-1, (heads, -1)), lse
