"""The clients of a server: who has a lease, what they are told, and when they are given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zmq

from seqpar.servers import protocol
from seqpar.servers.bound import BoundSocket
from seqpar.servers.leases import Lease, grant, refusal
from seqpar.servers.limits import Limits, ServerDeadlines
from seqpar.servers.protocol import Message, TransportName, encode
from seqpar.servers.stats import Stats
from seqpar.servers.transport import Transport


class Sessions:
    """The leases of a server, by the identity of the client's connection."""

    def __init__(
        self,
        bound: BoundSocket,
        transports: Mapping[TransportName, Transport],
        limits: Limits,
        deadlines: ServerDeadlines,
        stats: Stats,
        on_end: Callable[[Lease], None],
    ) -> None:
        """`on_end` is called with each lease that ends."""
        self._bound, self._transports, self._stats = bound, transports, stats
        self._limits, self._deadlines, self._on_end = limits, deadlines, on_end
        self._leases: dict[bytes, Lease] = {}
        self._gone: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    @property
    def held(self) -> int:
        """How many bytes are held for all clients."""
        return sum(lease.held for lease in self)

    def get(self, peer: bytes) -> Lease | None:
        """Return a client's lease, if it has one."""
        return self._leases.get(peer)

    def find(self, peer: bytes, generation: int) -> Lease | None:
        """Return the lease that a message is under, or tell the client that there is none."""
        lease = self._leases.get(peer)
        if lease is None or lease.generation != generation:
            self.send(peer, protocol.Stale(generation))
            return None
        lease.seen = time.monotonic()
        return lease

    def greet(
        self, peer: bytes, hello: protocol.Hello, device: str, room: int, draining: bool
    ) -> None:
        """Grant a lease, or say why there is none; `room` is what caches may have."""
        self.end(peer)
        reason = refusal(hello, self._transports)
        if reason is None and draining:
            reason = "the server is about to leave"
        if reason is None and len(self) >= self._limits.clients:
            reason = f"clients: the server has {self._limits.clients} already"
        if reason is not None:
            self.send(peer, protocol.Refused(reason[:200]))
            return
        limits, deadlines = self._limits, self._deadlines
        lease, welcome = grant(peer, hello, self._transports, limits, deadlines, device, room)
        self._leases[peer] = lease
        self.send(peer, welcome)

    def fail(self, peer: bytes, task: protocol.Task | protocol.Step, reason: str) -> None:
        """Tell a client that a request has no result."""
        self._stats.refused += 1
        self.send(peer, protocol.Failed(task.generation, task.request, reason[:200]))

    def send(self, peer: bytes, message: Message | bytes, *frames: Any) -> list[zmq.MessageTracker]:
        """Send a message without waiting; the lease of a client that has left will end."""
        data = message if isinstance(message, bytes) else encode(message)
        trackers = self._bound.send(peer, [data, *frames])
        if trackers is None:
            self._gone.add(peer)
        return trackers or []

    def give_up(self, lease: Lease) -> None:
        """End a lease whose payloads no longer arrive; its client is told, and may come again."""
        self.send(lease.peer, protocol.Stale(lease.generation))
        self._gone.add(lease.peer)

    def end(self, peer: bytes) -> None:
        """End a lease, and free all that it holds."""
        lease = self._leases.pop(peer, None)
        if lease is not None:
            lease.ended = True
            lease.transport.close(peer)
            self._on_end(lease)

    def end_gone(self) -> None:
        """End the leases of clients that have left."""
        while self._gone:
            self.end(self._gone.pop())

    def beat(self, now: float, waiting: int, room: int) -> None:
        """Give signs of life, and end the leases of clients that give none."""
        for lease in self:
            if now - lease.seen > self._deadlines.idle:
                self.end(lease.peer)
            else:
                lease.settle()
                self.send(lease.peer, protocol.Pong(lease.generation, waiting, room))
