"""Ranks of a group as others: some of them as a group of their own, or all of them as a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.comm.messages.header import Message


class SubComm(Comm):
    """Some ranks of a group as a group, numbered in the order given.

    What they send goes through the whole group's Comm and counts in its `sent_bytes`. Errors and
    traces call every exchange by `label` and `name`, as in "usp forward, ring", and not by the
    label that `exchange` is given.
    """

    def __init__(self, whole: Comm, ranks: Sequence[int], name: str, label: str) -> None:
        super().__init__(f"{whole.name}/{name}", ranks.index(whole.rank), len(ranks))
        self._whole, self._ranks, self._label = whole, ranks, f"{label}, {name}"

    def exchange(
        self, sends: Iterable[Message], recvs: Iterable[Message], *, label: str, step: int = 0
    ) -> Pending:
        """Post messages to and from these ranks, and return at once."""
        sends, recvs = (
            [(self._ranks[peer], tensor) for peer, tensor in messages]
            for messages in (sends, recvs)
        )
        return self._whole.exchange(sends, recvs, label=self._label, step=step)

    def channel(self, name: str) -> SubComm:
        """Return these ranks through the whole group's communicator of this name."""
        channel = copy(self)
        channel._whole = self._whole.channel(name)
        return channel


def as_mesh(comm: Comm, *shape: int) -> Comm:
    """Return the same ranks as a mesh of this shape, along whose rows they count.

    The bytes that are sent through it are counted apart.
    """
    group = comm._group()
    if group is not None:
        return Comm._of(group, tuple(comm._order), shape)
    mesh = copy(comm)
    mesh.name, mesh.shape = "x".join([comm.name, *map(str, shape[1:])]), shape
    return mesh
