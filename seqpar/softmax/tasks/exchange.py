"""Send rows to the servers of their tasks, and results back.

Messages have rows first, (n, B, H, …), where n is rows, B the batch and H heads, so that those of
several ranks are one block. What a backend takes, (B, n, H, …), is a view of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.comm.messages.header import Message
from seqpar.layout.tasks.task_rows import ServerRows
from seqpar.softmax.tasks.plan import Sent, Shipment, TaskPlan, TaskStage
from seqpar.softmax.wire.row_messages import Rows

Packed = dict[tuple[int, int], Tensor]  # of which rows, and of which tensors


class Returning:
    """Results that are under way to this rank, each with the rows that it is of."""

    def __init__(self, parts: list[tuple[Rows, Tensor]], pending: Pending) -> None:
        self._parts, self._pending = parts, pending

    def wait(self) -> Iterator[tuple[Rows, Tensor]]:
        """Wait for them; yield them in the order of their servers, freeing each."""
        self._pending.wait()
        self._parts.reverse()
        while self._parts:
            yield self._parts.pop()


class TaskExchange:
    """The messages of a pass. All that leaves for servers is posted when it is made.

    Attributes:
        plan: what it follows.
        guests: blocks of what comes with guests' rows, (n, B, Hq, …) each.
        keys: the block of keys and values that come, (n, B, Hkv, D + Dv).
    """

    def __init__(
        self,
        comm: Comm,
        plan: TaskPlan,
        label: str,
        queries: Sequence[Sequence[Tensor]],
        keys: Sequence[Tensor],
        kept: Tensor | None = None,
    ) -> None:
        """Post what leaves and what comes, stage by stage; errors and traces call it `label`.

        Tensors (B, T, H, D) of a group of `queries` travel side by side, as one message, and so do
        the `keys`, k and v. If this rank has `kept` the block of those that came, none travel.
        """
        # Behind rows that are dispatched, in the same communicator, results would wait.
        self.plan, self._label, self._results = plan, label, comm.channel("results")
        self.guests = [_block(plan.guests, group) for group in queries]
        self.keys = _block(plan.keys, keys) if kept is None else kept
        self._pending = list[Pending]()
        for stage in plan.stages:
            moving = [
                (stage.queries, group, block)
                for group, block in zip(queries, self.guests, strict=True)
            ]
            if kept is None:
                moving += [(shipment, keys, self.keys) for shipment in stage.keys]
            sends, recvs = list[Message](), list[Message]()
            packed: Packed = {}
            for shipment, tensors, block in moving:
                sends += _packed(shipment.sent, tensors, packed)
                recvs += _messages(shipment.block, block[shipment.rows])
            self._pending.append(comm.exchange(sends, recvs, label=label, step=stage.number))

    def arrivals(self) -> Iterator[tuple[TaskStage, list[Tensor]]]:
        """Yield each stage, when it has come, with what came with its guests, (B, n, Hq, …) each.

        All keys that they see are there, too.
        """
        for stage, pending in zip(self.plan.stages, self._pending, strict=True):
            pending.wait()
            yield stage, [block[stage.queries.rows].transpose(0, 1) for block in self.guests]

    def return_results(self, stage: TaskStage, results: Tensor) -> Returning:
        """Post results (n, B, …) of a stage's guests, and receive those of this rank's queries."""
        return self._return(stage, [(stage.queries, results)])

    def return_gradients(self, stage: TaskStage, gradients: Tensor) -> Returning:
        """Post the gradients of keys that no later stage needs, and receive those of this rank's.

        They are some of the `gradients` of the block of all keys.
        """
        return self._return(stage, [(x, gradients[x.rows]) for x in stage.done])

    def release(self) -> list[Tensor]:
        """Return the blocks of guests and of keys, which this then keeps no more."""
        blocks = [*self.guests, self.keys]
        del self.guests, self.keys
        return blocks

    def _return(self, stage: TaskStage, moving: Sequence[tuple[Shipment, Tensor]]) -> Returning:
        sends, recvs, returning = list[Message](), list[Message](), list[tuple[Rows, Tensor]]()
        for shipment, block in moving:
            sends += _messages(shipment.block, block)
            for peer, rows in shipment.sent:
                arriving = block.new_empty((rows.count, *block.shape[1:]))
                recvs.append((peer, arriving))
                returning.append((rows, arriving))
        pending = self._results.exchange(sends, recvs, label=self._label, step=stage.number)
        return Returning(returning, pending)


def _block(rows: int, tensors: Sequence[Tensor]) -> Tensor:
    """Return a new block (rows, B, H, ΣD) for rows of tensors (B, T, H, D), side by side."""
    batch, _, heads, _ = tensors[0].shape
    return tensors[0].new_empty((rows, batch, heads, sum(x.shape[3] for x in tensors)))


def _packed(sent: Sequence[Sent], tensors: Sequence[Tensor], packed: Packed) -> list[Message]:
    """Return these rows of the tensors as messages; what has been `packed` is not packed again."""
    messages = list[Message]()
    for peer, rows in sent:
        key = id(rows), id(tensors)
        if key not in packed:
            packed[key] = rows.pack(*(x.transpose(0, 1) for x in tensors))
        messages.append((peer, packed[key]))
    return messages


def _messages(coming: ServerRows, block: Tensor) -> list[Message]:
    """Return the messages that the rows of a block are."""
    parts = block.split_with_sizes(coming.counts) if coming.counts else ()
    return list(zip(coming.ranks, parts, strict=True))
