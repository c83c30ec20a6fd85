"""How payloads travel: one interface, of which both sides of a connection have an end.

A control message and its payload are sent together, by `Sending`: a transport moves the payload,
and once `progress` says that it is there, the owner sends what is to follow: the message with its
frames, or, where a transport brings the message with the payload, at most a knock. The thread that
owns an end makes all of its calls.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from seqpar.servers.wire.arena import placed
from seqpar.servers.wire.limits import MAX_FRAMES, PIECE_BYTES
from seqpar.servers.wire.protocol import Knock, TransportName, encode

WATCHING = 0.002  # seconds for which a side looks for what is written to it, after what is brief
# Bytes of a payload that is sent as one part. A frame, or a part of a write, costs 5 to 10 µs of
# both sides together, and copying 200 KiB 5 µs.
_BLOCK = 2**18
_SOON = 0.001  # seconds within which a write ends that needs nothing of the peer
_KNOCK, _UNDER_WAY = encode(Knock()), encode(Knock(under_way=True))


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
        message: the control message that goes with it.
        frames: what goes with the message.
        deadline: when it counts as failed, by the monotonic clock.
        moving: whether it is still on its way.
        notifies: whether the message is brought with the payload, to a peer that looks for it.
        error: why it did not arrive, or None.
        handle: the transport's own.
        started: when it was begun, by the monotonic clock.
        told: whether the peer knows that it is on its way.
    """

    peer: Hashable
    message: bytes
    frames: Sequence[Any]
    deadline: float
    moving: bool = False
    notifies: bool = False
    error: str | None = None
    handle: Any = field(default=None, repr=False)
    started: float = field(default_factory=time.monotonic)
    told: bool = False

    def meanwhile(self) -> list[Any]:
        """Return the frames that are to be sent now, while the payload is on its way."""
        if self.told or not self.notifies or time.monotonic() < self.started + _SOON:
            return []
        self.told = True
        return [_UNDER_WAY]

    def following(self, watched_until: float) -> list[Any]:
        """Return the frames that are to follow, to a peer that looks for messages until then."""
        if not self.notifies:
            return [self.message, *self.frames]
        return [] if time.monotonic() < watched_until else [_KNOCK]


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
    def share(self, most: int) -> int:
        """Return how many bytes of room to give a new peer, so that there is some for others."""

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
    def poll(self) -> list[tuple[Any, bytes]]:
        """Let peers' writes make progress; return the messages that came with them, by peer."""

    @abstractmethod
    def hurry(self) -> None:
        """Let `patience` be short for a while: what a peer writes may need this side."""

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


def joined(parts: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of a small payload as one, in which they lie as in an arena.

    To copy them takes less time than to send more parts. Those of a large one are returned.
    """
    sizes = [memoryview(part).nbytes for part in parts]
    places, total = placed(sizes)
    if len(parts) < 2 or total > _BLOCK:
        return parts
    block = np.zeros(total, np.uint8)
    for part, start, size in zip(parts, places, sizes, strict=True):
        block[start : start + size] = part
    return [block]


def pieces(parts: Sequence[Any], most: int = PIECE_BYTES) -> Sequence[Any]:
    """Return parts, those of more than `most` bytes in pieces; `Payload.whole` joins them again.

    ZeroMQ ends a connection on which no frame is completed for some seconds.
    """
    sizes = [memoryview(part).nbytes for part in parts]
    most = max(most, 2 * sum(sizes) // MAX_FRAMES)
    if max(sizes, default=0) <= most:
        return parts
    found: list[Any] = []
    for part, size in zip(parts, sizes, strict=True):
        data = memoryview(part).cast("B")
        found += [data[i : i + most] for i in range(0, size, most)]
    return found


class Frames(Transport):
    """ZeroMQ's: a payload travels as frames behind its message, large ones without a copy."""

    name: TransportName = "zmq"

    def open(self, peer: Hashable, arena: int) -> Reach:
        return Reach()

    def share(self, most: int) -> int:
        return 0

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
        return Sending(peer, message, joined(parts), deadline)

    def progress(self, sending: Sending) -> None:
        pass

    def poll(self) -> list[tuple[Any, bytes]]:
        return []

    def hurry(self) -> None:
        pass

    def patience(self) -> int:
        return 1000

    def read(
        self, peer: Hashable, frames: Sequence[Any], sizes: Sequence[int], place: int | None
    ) -> Sequence[Any]:
        if place is not None:
            raise TransportError("place: this client's payloads travel as frames")
        places, total = placed(sizes)
        if len(frames) == 1 < len(sizes) and len(frames[0]) == total:
            pairs = zip(places, sizes, strict=True)
            return [frames[0][start : start + size] for start, size in pairs]
        if len(frames) == sum(size > 0 for size in sizes):  # a server leaves out empty ones
            left = iter(frames)
            return [next(left) if size else b"" for size in sizes]
        return frames

    def shutdown(self) -> None:
        pass
