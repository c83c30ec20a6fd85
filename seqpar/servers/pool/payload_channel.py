"""How payloads travel between a pool and one server: by which transport, and where they arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from seqpar.servers.pool.work import Attempt
from seqpar.servers.transport.zeromq import (
    WATCHING,
    Frames,
    Reach,
    Sending,
    Transport,
    TransportError,
    pieces,
)
from seqpar.servers.wire.arena import Arena
from seqpar.servers.wire.protocol import (
    SECRET_BYTES,
    Hello,
    Result,
    TransportName,
    Welcome,
    encode,
)

_ROOM = 2**26  # bytes of our arena at most, for a server


class Lane:
    """The payloads of one connection, in both directions; one thread makes all calls.

    Attributes:
        arrived: messages that were written to this client, and have not been read.
    """

    def __init__(self, transports: Mapping[TransportName, Transport]) -> None:
        """Choose among these transports, the preferred one first."""
        self._transports, self._frames = transports, Frames()
        self.arrived: deque[bytes] = deque()
        self._transport: Transport = self._frames
        self._sendings: list[Sending] = []
        self.close()

    @property
    def transport(self) -> TransportName:
        """The name of the transport that was agreed."""
        return self._transport.name

    @property
    def moving(self) -> bool:
        """Whether payloads are on their way by one-sided writes."""
        return bool(self._sendings)

    def hurry(self) -> None:
        """Look for what the server writes more often."""
        self._transport.hurry()

    def watches(self, now: float) -> bool:
        """Return whether the server may write an answer at any moment without a knock."""
        return now < self._watch_until

    def offer(self, hello: dict[str, Any]) -> Hello:
        """Return a handshake that says how payloads may travel."""
        reach, names = Reach(), list[TransportName]()
        for name, transport in self._transports.items():
            reach = transport.open(self, transport.share(_ROOM))
            if reach.arena or name == "zmq":
                names.append(name)
            if reach.arena:
                break
        self._ours = Arena(reach.arena)
        names = list(dict.fromkeys([*names, "zmq"]))
        return Hello(
            **hello, transports=names, arena=reach.arena, offer=reach.offer, base=reach.base
        )

    def agree(self, welcome: Welcome) -> None:
        """Use the transport that the server has chosen."""
        self._theirs, self._session = Arena(welcome.arena), welcome.secret
        self._transport = self._transports.get(welcome.transport, self._frames)
        try:
            self._transport.connect(self, Reach(welcome.arena, welcome.base, welcome.offer))
        except TransportError:
            self._transport = self._frames

    def start(self, attempt: Attempt, generation: int, deadline: float, piece: int) -> None:
        """Begin to send a task: in frames of `piece` bytes, or by a write until the deadline."""
        transport: Transport = self._frames
        if self._transport.name != "zmq" and self._room(attempt):
            transport = self._transport
        watching = WATCHING if self._brief else 0.0
        self._watch_until = attempt.started + watching
        packed, places = attempt.work.packed, (attempt.place, attempt.result_place)
        header = packed.numbered(generation, attempt.number, *places, watching)
        message = encode(header, self._session)
        sending = transport.begin(self, message, packed.parts, attempt.place, deadline)
        sending.frames = pieces(sending.frames, piece)
        self._sendings.append(sending)

    def _room(self, attempt: Attempt) -> bool:
        """Take room for a payload and its result in both arenas, or in none."""
        form = attempt.work.packed.form
        attempt.place = self._theirs.take(form.request.room)
        if attempt.place is None:
            return False
        attempt.result_place = self._ours.take(form.result.room)
        if attempt.result_place is None:
            self._theirs.give(attempt.place)
            attempt.place = None
        return attempt.place is not None

    def free(self, attempt: Attempt) -> None:
        """Give back the room of an attempt that is answered."""
        if attempt.place is not None and attempt.result_place is not None:
            self._theirs.give(attempt.place)
            self._ours.give(attempt.result_place)

    def progress(self) -> tuple[list[list[Any]], str | None]:
        """Return messages that are to follow payloads, in frames, and why a payload has failed."""
        messages, broken, remaining = [], None, []
        for sending in self._sendings:
            self._transport.progress(sending)
            if sending.moving:
                remaining.append(sending)
                messages += [x for x in [sending.meanwhile()] if x]
            elif sending.error is not None:
                broken = sending.error
            elif following := sending.following(self._watched_until):
                messages.append(following)
        self._sendings = remaining
        return messages, broken

    def read(self, attempt: Attempt, result: Result, frames: Sequence[Any]) -> Sequence[Any]:
        """Return the buffers of a result."""
        self._brief = result.watching > 0
        self._watched_until = time.monotonic() + result.watching
        transport = self._frames if attempt.result_place is None else self._transport
        sizes = attempt.work.packed.form.result.sizes
        return transport.read(self, frames, sizes, attempt.result_place)

    def close(self) -> None:
        """Forget the server, and all that is on its way."""
        for transport in self._transports.values():
            transport.close(self)
        self._transport = self._frames
        self._sendings = []
        self.arrived.clear()
        self._ours, self._theirs = Arena(0), Arena(0)
        self._session = bytes(SECRET_BYTES)
        self._brief, self._watch_until, self._watched_until = False, 0.0, 0.0
