"""What a server knows of its clients: a lease each, under a generation that no other has."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

import zmq

from seqpar.servers.server.worker import ComputeJob
from seqpar.servers.transport.peers import Peer
from seqpar.servers.transport.zeromq import Reach, Transport, TransportError
from seqpar.servers.wire.codec import KeptSlices
from seqpar.servers.wire.header import DTYPES
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.protocol import SECRET_BYTES, Hello, TransportName, Welcome

_ROOM = 2**26  # bytes of memory for one-sided writes at most, of a client
_OVERTAKEN = 1024  # numbers by which a request may be overtaken


@dataclass(eq=False)
class Lease:
    """What one client may ask for, and what it has in flight.

    Attributes:
        peer: its connection, and the key that authenticated it.
        transport: how its payloads travel.
        generation: which its messages must bear; a lease that follows has another.
        secret: 128 random bits that its messages must carry.
        seen: when it last said something, by the monotonic clock.
        jobs: what it has asked for and not been sent, by number.
        leaving: the bytes of results that have been handed to the socket, which count until all of
            them have left.
        untracked: the bytes of small results that were handed to the socket since the last tracker.
        kept: the slices of its last tasks.
        reading: how many of the jobs have payloads that are still read.
        watched_until: when the client ceases to look for what is written to it.
        ended: whether it has ended.
        pulse: the client's other connection, on which signs of life pass payloads, or None.
    """

    peer: Peer
    transport: Transport
    generation: int = field(default_factory=lambda: 1 + secrets.randbelow(2**62 - 1))
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))
    seen: float = field(default_factory=time.monotonic)
    jobs: dict[int, ComputeJob] = field(default_factory=dict)
    leaving: list[tuple[int, list[zmq.MessageTracker]]] = field(default_factory=list)
    untracked: int = 0
    kept: KeptSlices = field(default_factory=KeptSlices)
    reading: int = 0
    watched_until: float = 0.0
    ended: bool = False
    pulse: Peer | None = None
    _last: int = 0
    _used: set[int] = field(default_factory=set)

    def use(self, number: int) -> bool:
        """Return whether a request's number has not been used.

        What is written and what comes through the socket may overtake each other, but not by far:
        numbers far below the largest one count as used.
        """
        if number <= max(0, self._last - _OVERTAKEN) or number in self._used:
            return False
        self._used.add(number)
        self._last = max(self._last, number)
        if len(self._used) > 2 * _OVERTAKEN:
            self._used = {x for x in self._used if x > self._last - _OVERTAKEN}
        return True

    def settle(self) -> None:
        """Forget the results that have left."""
        if self.leaving:
            self.leaving = [x for x in self.leaving if not all(each.done for each in x[1])]

    @property
    def in_flight(self) -> int:
        """How many of its credits are used."""
        return len(self.jobs) + len(self.leaving)

    @property
    def held(self) -> int:
        """How many bytes are held for it."""
        return self.requested + self.kept.nbytes

    @property
    def requested(self) -> int:
        """How many bytes its requests and results hold, except the last MiB of small results."""
        leaving = sum(size for size, _ in self.leaving)
        return sum(job.size for job in self.jobs.values()) + leaving


def library_version() -> str:
    """Return seqpar's version."""
    version: str = import_module("seqpar").__version__
    return version


def refusal(hello: Hello, transports: Mapping[TransportName, Transport]) -> str | None:
    """Return why a client gets no lease, naming what both sides have, or None."""
    own = library_version()
    if hello.library != own:
        return f"library: the server has seqpar {own}, the client {hello.library[:40]}"
    if missing := [name for name in hello.dtypes if name not in DTYPES]:
        return f"dtypes: the server takes {sorted(DTYPES)}, and not the client's {missing}"
    if not any(name in transports for name in hello.transports):
        return f"transports: the server has {list(transports)}, the client {hello.transports}"
    return None


def grant(
    peer: Peer,
    hello: Hello,
    transports: Mapping[TransportName, Transport],
    limits: Limits,
    deadlines: ServerDeadlines,
    device: str,
    room: int,
) -> tuple[Lease, Welcome]:
    """Return a lease over the first of the client's transports that can be opened.

    `room` is how many bytes caches may have.
    """
    chosen, reach = transports["zmq"], Reach()
    for name in hello.transports:
        if name == "zmq":
            break
        if (transport := transports.get(name)) is None:
            continue
        try:
            reach = transport.open(peer, transport.share(min(hello.arena, _ROOM)))
            transport.connect(peer, Reach(hello.arena, hello.base, hello.offer))
        except TransportError:
            transport.close(peer)
            reach = Reach()
        else:
            chosen = transport
            break
    lease = Lease(peer, chosen)
    welcome = Welcome(
        generation=lease.generation,
        secret=lease.secret,
        library=library_version(),
        device=device,
        dtypes=list(DTYPES),
        transport=chosen.name,
        credits=limits.requests,
        tokens=limits.tokens,
        bytes=limits.bytes,
        idle=deadlines.idle,
        cache_room=room,
        arena=reach.arena,
        offer=reach.offer,
        base=reach.base,
    )
    return lease, welcome
