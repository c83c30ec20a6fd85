"""The clients of a server: who has a lease, what they are told, and when they are given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from hmac import compare_digest
from typing import Any

import zmq

from seqpar.servers.server.leases import Lease, grant, refusal
from seqpar.servers.server.stats import Stats
from seqpar.servers.transport.peers import Peer, fits
from seqpar.servers.transport.server_socket import BoundSocket
from seqpar.servers.transport.zeromq import Transport
from seqpar.servers.wire import protocol
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.protocol import Message, TransportName, encode

# The audit log: who gets a lease (INFO), who is refused one, and who loses it (WARNING).
AUDIT = logging.getLogger("seqpar.servers.audit")
_LINES, _SECONDS = 100, 10.0  # of that log at most: a flood of clients shall not fill a disk


class _Audit:
    """Writes the audit log, without an address or a secret; a client's public key names it."""

    def __init__(self) -> None:
        self._until, self._lines, self._dropped = 0.0, 0, 0

    def write(self, level: int, event: str, peer: Peer, detail: str) -> None:
        """Write a line, unless there were too many in a short time."""
        now = time.monotonic()
        if now > self._until:
            if self._dropped:
                AUDIT.warning("%d lines were left out", self._dropped)
            self._until, self._lines, self._dropped = now + _SECONDS, 0, 0
        self._lines += 1
        if self._lines > _LINES:
            self._dropped += 1
        else:
            client = " ".join(filter(None, [peer.route.hex(), peer.key]))
            AUDIT.log(level, "%s: client %s: %s", event, client, detail)


class Sessions:
    """The leases of a server, by connection and key."""

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
        self._leases: dict[Peer, Lease] = {}
        self._pulses: dict[Peer, Lease] = {}
        self._gone: set[Peer] = set()
        self._audit = _Audit()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    @property
    def held(self) -> int:
        """How many bytes are held for all clients."""
        return sum(lease.held for lease in self)

    def get(self, peer: Peer) -> Lease | None:
        """Return a client's lease, if it has one."""
        return self._leases.get(peer)

    def find(self, peer: Peer, generation: int) -> Lease | None:
        """Return the lease that a message is under, or tell the client that there is none."""
        lease = self._leases.get(peer)
        if lease is None or lease.generation != generation:
            self.send(peer, protocol.Stale(generation))
            return None
        lease.seen = time.monotonic()
        return lease

    def by_pulse(self, peer: Peer, generation: int, secret: bytes) -> Lease | None:
        """Return the lease of which a sign of life came on a connection of its own, or None.

        The connection must have the key of the lease's, and know its secret.
        """
        lease = self._pulses.get(peer)
        if lease is None or lease.generation != generation:
            lease = next((x for x in self if x.generation == generation), None)
        if lease is None or lease.peer.key != peer.key or not compare_digest(lease.secret, secret):
            return None
        if lease.pulse != peer:
            self._end_pulse(lease)
            lease.pulse, self._pulses[peer] = peer, lease
        lease.seen = time.monotonic()
        return lease

    def _end_pulse(self, lease: Lease) -> None:
        if lease.pulse is not None:
            del self._pulses[lease.pulse]
            self._bound.cut(lease.pulse)
            lease.pulse = None

    def greet(
        self, peer: Peer, hello: protocol.Hello, device: str, room: int, draining: bool
    ) -> None:
        """Grant a lease, or say why there is none; `room` is what caches may have."""
        self.end(peer)
        reason = refusal(hello, self._transports)
        if reason is None and draining:
            reason = "the server is about to leave"
        if reason is None and not self._has_place(peer.key):
            reason = f"clients: the server has {len(self)} already of {self._limits.clients}"
        if reason is not None:
            self.refuse(peer, reason)
            return
        limits, deadlines = self._limits, self._deadlines
        lease, welcome = grant(peer, hello, self._transports, limits, deadlines, device, room)
        self._leases[peer] = lease
        self._audit.write(logging.INFO, "lease", peer, f"{hello.client} by {welcome.transport}")
        self.send(peer, welcome)

    def refuse(self, peer: Peer, reason: str) -> None:
        """Tell a client that it gets no lease, and why."""
        self._audit.write(logging.WARNING, "refused", peer, reason[:200])
        self.send(peer, protocol.Refused(reason[:200]))

    def _has_place(self, key: str) -> bool:
        own = sum(lease.peer.key == key for lease in self)
        return fits(1, own, len(self), self._limits.clients, self._bound.shared)

    def fits(self, key: str, size: int) -> bool:
        """Return whether a key's requests may hold so many bytes more; kept slices give way."""
        most, used = self._limits.queued_bytes, sum(lease.requested for lease in self)
        own = sum(lease.requested for lease in self if lease.peer.key == key)
        if not fits(size, own, used, most, self._bound.shared):
            return False
        if self.held + size > most:
            for lease in self:
                if not lease.reading:  # else another thread uses them
                    lease.kept.clear()
        return self.held + size <= most

    def cut(self, peer: Peer) -> None:
        """End a connection whose key is no longer trusted, with its lease."""
        self._audit.write(logging.WARNING, "evicted", peer, "its key is no longer trusted")
        self.end(peer)
        self._bound.cut(peer)

    def fail(self, peer: Peer, task: protocol.Task | protocol.StepRequest, reason: str) -> None:
        """Tell a client that a request has no result."""
        self._stats.refused += 1
        self.send(peer, protocol.Failed(task.generation, task.request, reason[:200]))

    def send(
        self, peer: Peer, message: Message | bytes, *frames: Any, track: bool = False
    ) -> list[zmq.MessageTracker]:
        """Send a message without waiting; the lease of a client that has left will end.

        The trackers tell when frames have left; small frames have none, except the last if `track`.
        """
        data = message if isinstance(message, bytes) else encode(message)
        trackers = self._bound.send(peer, [data, *frames], track)
        if trackers is None:
            self._gone.add(peer)
        return trackers or []

    def give_up(self, lease: Lease) -> None:
        """End a lease whose payloads no longer arrive; its client is told, and may come again."""
        self._audit.write(logging.WARNING, "evicted", lease.peer, "its results do not arrive")
        self.send(lease.peer, protocol.Stale(lease.generation))
        self._gone.add(lease.peer)

    def end(self, peer: Peer) -> None:
        """End a lease, and free all that it holds."""
        lease = self._leases.pop(peer, None)
        if lease is not None:
            lease.ended = True
            self._end_pulse(lease)
            lease.transport.close(peer)
            self._on_end(lease)

    def end_gone(self) -> None:
        """End the leases of clients that have left."""
        while self._gone:
            peer = self._gone.pop()
            if (lease := self._pulses.get(peer)) is not None:
                self._end_pulse(lease)
            else:
                self.end(peer)

    def beat(self, now: float, waiting: int, room: Callable[[str], int]) -> None:
        """Give signs of life, and end leases of clients that give none or whose key is revoked.

        `room` returns how many bytes more the caches of a key may have.
        """
        self._bound.beat()
        for key in self._bound.refusals():
            self._audit.write(logging.WARNING, "refused", Peer(b"", key), "its key is not trusted")
        for lease in self:
            if not self._bound.trusts(lease.peer):
                self.cut(lease.peer)
            elif now - lease.seen > self._deadlines.idle:
                silent = f"nothing was heard of it for {now - lease.seen:.1f} s"
                self._audit.write(logging.WARNING, "evicted", lease.peer, silent)
                self.end(lease.peer)
            else:
                lease.settle()
                own = room(lease.peer.key)
                pong = protocol.Pong(lease.generation, waiting, own)
                for peer in filter(None, (lease.peer, lease.pulse)):
                    self.send(peer, pong)
