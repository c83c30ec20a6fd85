"""Views of a group: some of its ranks as a group, or all of its ranks as a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.comm.messages.header import Message


class SubComm(Comm):
    """Some ranks of a group as a group, numbered in the order of `ranks`.

    Their messages go through the whole group's Comm and count in its `sent_bytes`. Errors and
    traces name every exchange by `label` and `name`, such as "usp forward, ring", and not by the
    label of `exchange`.
    """

    def __init__(self, whole: Comm, ranks: Sequence[int], name: str, label: str) -> None:
        super().__init__(f"{whole.name}/{name}", ranks.index(whole.rank), len(ranks))
        self._whole, self._ranks, self._label = whole, ranks, f"{label}, {name}"

    @property
    def is_routed(self) -> bool:
        """Whether this rank may relay messages of other ranks of the whole group."""
        return self._whole.is_routed

    def exchange(
        self, sends: Iterable[Message], recvs: Iterable[Message], *, label: str, step: int = 0
    ) -> Pending:
        """Post messages to and from these ranks, and return immediately."""
        sends, recvs = (
            [(self._ranks[peer], tensor) for peer, tensor in messages]
            for messages in (sends, recvs)
        )
        return self._whole.exchange(sends, recvs, label=self._label, step=step)

    def channel(self, name: str) -> SubComm:
        """Return these ranks with the whole group's communicator of this name."""
        channel = copy(self)
        channel._whole = self._whole.channel(name)
        return channel


def as_mesh(comm: Comm, *shape: int) -> Comm:
    """Return the same ranks as a mesh of this shape, counted along its rows.

    The mesh has its own counts of sent bytes.
    """
    group = comm._group()
    if group is not None:
        return Comm._of(group, tuple(comm._order), shape)
    mesh = copy(comm)
    mesh.name, mesh.shape = "x".join([comm.name, *map(str, shape[1:])]), shape
    return mesh
