"""Send rows to the servers of their tasks, and results back.

Messages have rows first, (n, B, H, …), where n is rows, B the batch and H heads, so that those of
several ranks are one block. What a backend takes, (B, n, H, …), is a view of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from seqpar.comm.exchange import Comm, Pending
from seqpar.comm.header import Message
from seqpar.softmax.rows import Rows
from seqpar.softmax.task_plan import Came, Sent, Stage, TaskPlan


class Returning(NamedTuple):
    """Results that are under way to this rank, of rows that it sent."""

    sent: list[Sent]
    block: Tensor
    pending: Pending

    def wait(self) -> list[tuple[Rows, Tensor]]:
        """Wait for them; return those of each server, and whose they are, in the servers' order."""
        self.pending.wait()
        parts = self.block.split_with_sizes([rows.count for _, rows in self.sent])
        return [(rows, part) for (_, rows), part in zip(self.sent, parts, strict=True)]


class TaskExchange:
    """The messages of a pass. All that leaves for servers is posted when it is made.

    Attributes:
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
        self._comm, self._results = comm, comm.channel("results")
        self._plan, self._label = plan, label
        self.guests = [_block(plan.guests, group) for group in queries]
        self.keys = _block(plan.keys, keys) if kept is None else kept
        self._pending = list[Pending]()
        for stage in plan.stages:
            sends, recvs = list[Message](), list[Message]()
            for group, block in zip(queries, self.guests, strict=True):
                sends += _packed(stage.queries_to, group)
                recvs += _messages(stage.guests, block[stage.guest_rows])
            if kept is None:
                sends += _packed(stage.keys_to, keys)
                recvs += _messages(stage.keys, self.keys[stage.key_rows])
            self._pending.append(comm.exchange(sends, recvs, label=label, step=stage.number))

    def arrivals(self) -> Iterator[tuple[Stage, list[Tensor]]]:
        """Yield each stage, when it has come, with what came with its guests, (B, n, Hq, …) each.

        All keys that they see are there, too.
        """
        for stage, pending in zip(self._plan.stages, self._pending, strict=True):
            pending.wait()
            yield stage, [block[stage.guest_rows].transpose(0, 1) for block in self.guests]

    def return_to_homes(self, stage: Stage, results: Tensor) -> Returning:
        """Post results (n, B, …) of a stage's guests, and receive those of this rank's queries."""
        return self._return(stage.guests, results, stage.queries_to, stage)

    def return_to_owners(self, gradients: Tensor) -> list[Returning]:
        """Post gradients of the block of keys, and receive those of this rank's keys."""
        return [
            self._return(stage.keys, gradients[stage.key_rows], stage.keys_to, stage)
            for stage in self._plan.stages
        ]

    def _return(
        self, came: Sequence[Came], block: Tensor, sent: list[Sent], stage: Stage
    ) -> Returning:
        coming = [Came(peer, rows.count) for peer, rows in sent]
        arriving = block.new_empty((sum(x.rows for x in coming), *block.shape[1:]))
        sends, recvs = _messages(came, block), _messages(coming, arriving)
        pending = self._results.exchange(sends, recvs, label=self._label, step=stage.number)
        return Returning(sent, arriving, pending)


def _block(rows: int, tensors: Sequence[Tensor]) -> Tensor:
    """Return a new block (rows, B, H, ΣD) for rows of tensors (B, T, H, D), side by side."""
    batch, _, heads, _ = tensors[0].shape
    return tensors[0].new_empty((rows, batch, heads, sum(x.shape[3] for x in tensors)))


def _packed(sent: Sequence[Sent], tensors: Sequence[Tensor]) -> list[Message]:
    """Return these rows of the tensors as messages; peers that get the same rows share one."""
    packed: dict[int, Tensor] = {}
    for _, rows in sent:
        if id(rows) not in packed:
            packed[id(rows)] = rows.pack(*tensors)
    return [(peer, packed[id(rows)]) for peer, rows in sent]


def _messages(came: Sequence[Came], block: Tensor) -> list[Message]:
    """Return the messages that the block's rows are, so many of each peer."""
    parts = block.split_with_sizes([x.rows for x in came]) if came else ()
    return [(x.peer, part) for x, part in zip(came, parts, strict=True)]
