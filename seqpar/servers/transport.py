"""How payloads travel: one interface, of which both sides of a connection have an end.

A control message and its payload are sent together, by `Sending`: a transport moves the payload,
and once `progress` says that it is there, the message follows with the transport's frames, if it
has any. The thread that owns an end makes all of its calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from seqpar.servers.protocol import TransportName


class TransportError(RuntimeError):
    """A payload did not arrive."""


class Reach(NamedTuple):
    """How one-sided writes reach a side: its arena's size and address, and what its agent says."""

    arena: int = 0
    base: int = 0
    offer: bytes = b""


@dataclass(eq=False)
class Sending:
    """A payload on its way.

    Attributes:
        peer: whom it goes to.
        message: the control message that follows it.
        frames: what goes with the message.
        deadline: when it counts as failed, by the monotonic clock.
        moving: whether it is still on its way.
        error: why it did not arrive, or None.
        handle: the transport's own.
    """

    peer: Hashable
    message: bytes
    frames: Sequence[Any]
    deadline: float
    moving: bool = False
    error: str | None = None
    handle: Any = field(default=None, repr=False)


class Transport(ABC):
    """One end of a transport.

    Attributes:
        name: by which both sides choose it.
    """

    name: TransportName

    @abstractmethod
    def open(self, peer: Hashable, arena: int) -> Reach:
        """Make room for what a peer sends, so many bytes if that is possible; say how to reach it.

        The room is kept until `close`.
        """

    @abstractmethod
    def connect(self, peer: Hashable, reach: Reach) -> None:
        """Learn how to reach a peer; raise a TransportError if that makes no sense."""

    @abstractmethod
    def close(self, peer: Hashable) -> None:
        """Forget a peer, end what is on its way to it, and free its room."""

    @abstractmethod
    def begin(
        self,
        peer: Hashable,
        message: bytes,
        parts: Sequence[Any],
        place: int | None,
        deadline: float,
    ) -> Sending:
        """Begin to send a payload, buffers of bytes, to this place in the peer's arena.

        The buffers must not change until it is there.
        """

    @abstractmethod
    def progress(self, sending: Sending) -> None:
        """Update whether a payload is still on its way."""

    @abstractmethod
    def poll(self) -> None:
        """Let peers' writes make progress, where that needs this side."""

    @abstractmethod
    def patience(self) -> int:
        """Return after how many milliseconds `poll` should be called again."""

    @abstractmethod
    def read(
        self, peer: Hashable, frames: Sequence[Any], sizes: Sequence[int], place: int | None
    ) -> Sequence[Any]:
        """Return the buffers of a payload that arrived with these frames, or at this place.

        They hold until the room is used again. Raise a TransportError if the place is none of this
        peer's.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Free all."""


class Frames(Transport):
    """ZeroMQ's: a payload travels as frames behind its message."""

    name: TransportName = "zmq"

    def open(self, peer: Hashable, arena: int) -> Reach:
        return Reach()

    def connect(self, peer: Hashable, reach: Reach) -> None:
        pass

    def close(self, peer: Hashable) -> None:
        pass

    def begin(
        self,
        peer: Hashable,
        message: bytes,
        parts: Sequence[Any],
        place: int | None,
        deadline: float,
    ) -> Sending:
        return Sending(peer, message, parts, deadline)

    def progress(self, sending: Sending) -> None:
        pass

    def poll(self) -> None:
        pass

    def patience(self) -> int:
        return 1000

    def read(
        self, peer: Hashable, frames: Sequence[Any], sizes: Sequence[int], place: int | None
    ) -> Sequence[Any]:
        if place is not None:
            raise TransportError("place: this client's payloads travel as frames")
        return frames

    def shutdown(self) -> None:
        pass
