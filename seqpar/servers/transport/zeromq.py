"""The interface of transports, which move payloads, and the transport that uses ZeroMQ frames.

Each side of a connection has one end of a transport. A `Sending` is a control message and its
payload. The transport moves the payload; when `progress` finds that it has arrived, the owner sends
`Sending.due`: the message with its frames or, where the transport delivers the message with
the payload, at most a knock. All calls to an end come from the thread that owns it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from seqpar.servers.wire.arena import placed
from seqpar.servers.wire.limits import MAX_FRAMES, PIECE_BYTES
from seqpar.servers.wire.payload import Buffer, Bytes, Frame, view_of
from seqpar.servers.wire.protocol import Knock, TransportName, encode

WATCHING = 0.002  # seconds for which a side polls for direct writes, after a brief request
# Bytes; a payload of at most this size is copied and sent as one part. A frame, or a part of a
# write, costs 5 to 10 µs on both sides together, and copying 200 KiB costs 5 µs.
_BLOCK = 2**18
_SOON = 0.001  # seconds within which a write ends if it does not depend on the peer
_KNOCK, _UNDER_WAY = encode(Knock()), encode(Knock(under_way=True))


class TransportError(RuntimeError):
    """A payload did not arrive."""


class ArenaTarget(NamedTuple):
    """The target of one-sided writes: an arena's size, its address, and its agent's metadata."""

    arena: int = 0
    base: int = 0
    offer: bytes = b""


@dataclass(eq=False)
class Sending:
    """A payload in transit, with its control message. Times are by the monotonic clock."""

    peer: Hashable
    message: bytes
    deadline: float  # when the payload counts as lost
    frames: Sequence[Buffer] = ()  # sent with the message
    moving: bool = False  # whether the payload is still in transit
    notifies: bool = False  # whether the message arrives with the payload, at a peer that polls
    error: str | None = None  # why the payload did not arrive
    started: float = field(default_factory=time.monotonic)
    told: bool = False  # whether the peer was told that a payload is in transit

    def due(self, watched_until: float) -> list[Buffer]:
        """Return frames to send now, to a peer that polls until `watched_until`."""
        now = time.monotonic()
        if self.error is not None:
            return []
        if self.moving:
            if self.told or not self.notifies or now < self.started + _SOON:
                return []
            self.told = True
            return [_UNDER_WAY]
        if self.notifies:
            return [] if now < watched_until else [_KNOCK]
        return [self.message, *self.frames]


class Transport:
    """One end of a transport. Most methods are for one-sided writes and do nothing without."""

    name: TransportName  # both sides choose the transport by this name

    def open(self, peer: Hashable, arena: int) -> ArenaTarget:
        """Reserve `arena` bytes for a peer until `close`, if possible; return how to reach them."""
        return ArenaTarget()

    def share(self, most: int) -> int:
        """Return how many bytes to reserve for a new peer, at most `most`: others need some too."""
        return 0

    def connect(self, peer: Hashable, target: ArenaTarget) -> None:
        """Remember how to reach a peer; raise a TransportError if `target` is not valid."""

    def close(self, peer: Hashable) -> None:
        """Forget a peer, end transfers to it, and free the bytes that were reserved for it."""

    def begin(self, sending: Sending, parts: Sequence[Bytes], place: int | None) -> Sending:
        """Begin to send `parts` to `place` in the peer's arena; return `sending`.

        The buffers must not change until the payload has arrived.
        """
        raise NotImplementedError

    def progress(self, sending: Sending) -> None:
        """Update `sending.moving` and `sending.error`."""

    def poll(self) -> list[tuple[Any, bytes]]:
        """Advance peers' writes, and return (peer, message) of those that have arrived."""
        return []

    def hurry(self) -> None:
        """Shorten `patience` for a while: a peer's write may need this side to poll."""

    def patience(self) -> int:
        """Return the number of milliseconds until `poll` should be called again."""
        return 1000

    def read(
        self, peer: Hashable, frames: Sequence[Frame], sizes: Sequence[int], place: int | None
    ) -> Sequence[Buffer]:
        """Return the buffers of a payload that arrived in these frames, or at `place` in the arena.

        The buffers are valid until their bytes are reused. A `place` outside of the bytes that are
        reserved for this peer raises a TransportError.
        """
        raise NotImplementedError

    def shutdown(self) -> None:
        """Close all peers and free all memory."""


def joined(parts: Sequence[Bytes]) -> Sequence[Bytes]:
    """Return the parts of a payload of at most 256 KiB as one part, placed as in an arena.

    Copying them takes less time than sending several parts.
    """
    sizes = [part.nbytes for part in parts]
    places, total = placed(sizes)
    if len(parts) < 2 or total > _BLOCK:
        return parts
    block = np.zeros(total, np.uint8)
    for part, start, size in zip(parts, places, sizes, strict=True):
        block[start : start + size] = part
    return [block]


def pieces(parts: Sequence[Buffer], most: int = PIECE_BYTES) -> Sequence[Buffer]:
    """Return the parts, cut into pieces where they exceed `most` bytes.

    `Payload.whole` joins the pieces again. A connection on which no frame is completed for some
    seconds is ended, so a frame must not be too large. Pieces are larger where the payload would
    otherwise have too many frames.
    """
    sizes = [view_of(part).nbytes for part in parts]
    most = max(most, 2 * sum(sizes) // MAX_FRAMES)
    if max(sizes, default=0) <= most:
        return parts
    cut: list[Buffer] = []
    for part, size in zip(parts, sizes, strict=True):
        data = view_of(part).cast("B")
        cut += [data[i : i + most] for i in range(0, size, most)]
    return cut


class Frames(Transport):
    """Sends payloads as ZeroMQ frames after their message, large payloads without a copy."""

    name: TransportName = "zmq"

    def begin(self, sending: Sending, parts: Sequence[Bytes], place: int | None) -> Sending:
        sending.frames = joined(parts)
        return sending

    def read(
        self, peer: Hashable, frames: Sequence[Frame], sizes: Sequence[int], place: int | None
    ) -> Sequence[Buffer]:
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
