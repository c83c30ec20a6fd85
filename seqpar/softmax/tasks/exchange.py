"""Send rows to the servers of their tasks, and results back to the owners.

Messages are (n, B, H, …): n rows, B batch, H heads. Rows come first, so messages from several ranks
are parts of one block, and the tensor that a backend takes, (B, n, H, …), is a view of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.comm.messages.header import Message
from seqpar.layout.tasks.task_rows import ServerRows
from seqpar.softmax.tasks.plan import Sent, Shipment, TaskPlan, TaskStage
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


class TaskExchange:
    """The messages of a pass. The constructor posts all messages to servers.

    Attributes:
        plan: the plan that it follows.
        foreign_queries: one block (n, B, Hq, …) per group of tensors that travel with queries.
        foreign_keys: the block of foreign keys and values, (n, B, Hkv, D + Dv).
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
        """Post the sends and receives of all stages. `label` names them in errors and traces.

        The tensors (B, T, H, D) of one group of `queries` share a message, and so do the `keys`, k
        and v. `kept` is the block of foreign keys that servers kept in forward; with it, no keys
        travel.
        """
        # A separate channel: in the same communicator, results would wait for later stages' rows.
        self.plan, self._label, self._results = plan, label, comm.channel("results")
        self.foreign_queries = [_block(plan.foreign_queries, group) for group in queries]
        self.foreign_keys = _block(plan.foreign_keys, keys) if kept is None else kept
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
        for shipment, block in moving:
            sends += _messages(shipment.block, block)
            for peer, rows in shipment.sent:
                arriving = block.new_empty((rows.count, *block.shape[1:]))
                recvs.append((peer, arriving))
                returning.append((rows, arriving))
        pending = self._results.exchange(sends, recvs, label=self._label, step=stage.number)
        return Returning(returning, pending)


def _block(rows: int, tensors: Sequence[Tensor]) -> Tensor:
    """Return a new block (rows, B, H, ΣD) for rows of tensors (B, T, H, D), next to each other."""
    batch, _, heads, _ = tensors[0].shape
    return tensors[0].new_empty((rows, batch, heads, sum(x.shape[3] for x in tensors)))


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
