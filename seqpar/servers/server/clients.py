"""The clients of a server: one object per client, and the set of them.

A client has a lease from its greeting until it says goodbye, stays silent for too long, or loses
its key. The lease's generation differs from all others, so a message that refers to an earlier
lease is recognized.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hmac import compare_digest

import zmq

from seqpar.servers.server.counters import Totals
from seqpar.servers.server.worker import ComputeJob
from seqpar.servers.transport.peers import Peer, fits
from seqpar.servers.transport.server_socket import ServerSocket
from seqpar.servers.transport.zeromq import ArenaTarget, Transport, TransportError
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import KeptSlices
from seqpar.servers.wire.header import DTYPES
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.payload import Buffer
from seqpar.servers.wire.protocol import Hello, Message, TransportName, library_version

# Granted leases (INFO), refused ones and lost ones (WARNING).
AUDIT = logging.getLogger("seqpar.servers.audit")
_MAX_LOG_LINES, _LOG_SECONDS = 100, 10.0  # a flood of clients must not fill a disk
_MAX_ARENA_BYTES = 2**26  # per client, for requests that it writes directly
_DEPTH_OF_POOLS = 4  # requests that a pool sends to a server at a time, by default
_MAX_OVERTAKING = 1024  # requests that may arrive before an earlier one


@dataclass(eq=False)
class ClientConnection:
    """One client: its connection and key, its lease, its payload channel and its bytes."""

    peer: Peer
    transport: Transport  # of its payloads
    credits: int  # requests that it may have in flight
    # Every message must carry the generation and the secret of the lease.
    generation: int = field(default_factory=lambda: 1 + secrets.randbelow(2**62 - 1))
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(protocol.SECRET_BYTES))
    seen: float = field(default_factory=time.monotonic)  # when its last message arrived
    jobs: dict[int, ComputeJob] = field(default_factory=dict)  # without an answer, by number
    # Bytes and trackers of results in the socket's queue, which count until they leave.
    leaving: list[tuple[int, list[zmq.MessageTracker]]] = field(default_factory=list)
    untracked: int = 0  # bytes of small results that entered the queue after the last tracker
    kept: KeptSlices = field(default_factory=KeptSlices)  # of its last tasks
    reading: int = 0  # the number of jobs whose payloads another thread still reads
    watched_until: float = 0.0  # until then it looks for direct replies without being woken
    ended: bool = False
    pulse: Peer | None = None  # its second connection, which carries signs of life
    _last_number: int = 0
    _used_numbers: set[int] = field(default_factory=set)

    def use(self, number: int) -> bool:
        """Use a request's number; return False if it was used before."""
        # Direct writes and frames may overtake each other, but not by far. So numbers far below the
        # largest one count as used, and the set stays small.
        if number <= max(0, self._last_number - _MAX_OVERTAKING) or number in self._used_numbers:
            return False
        self._used_numbers.add(number)
        self._last_number = max(self._last_number, number)
        if len(self._used_numbers) > 2 * _MAX_OVERTAKING:
            least = self._last_number - _MAX_OVERTAKING
            self._used_numbers = {x for x in self._used_numbers if x > least}
        return True

    def settle(self) -> None:
        """Forget results that have left the socket."""
        if self.leaving:
            self.leaving = [x for x in self.leaving if not all(each.done for each in x[1])]

    @property
    def in_flight(self) -> int:
        """The number of its credits in use."""
        return len(self.jobs) + len(self.leaving)

    @property
    def unanswered(self) -> int:
        """The number of its requests of which it cannot have the result yet."""
        return sum(job.result is None for job in self.jobs.values())

    @property
    def held(self) -> int:
        """Bytes that the server holds for it, without its caches."""
        return self.requested + self.kept.nbytes

    @property
    def requested(self) -> int:
        """Bytes of its requests and results, without the last MiB of small results."""
        leaving = sum(size for size, _ in self.leaving)
        return sum(job.size for job in self.jobs.values()) + leaving


def refusal(hello: Hello, transports: Mapping[TransportName, Transport]) -> str | None:
    """Return why a client and this server do not fit together, or None."""
    own = library_version()
    if hello.library != own:
        return f"library: the server has seqpar {own}, the client {hello.library[:40]}"
    if missing := [name for name in hello.dtypes if name not in DTYPES]:
        return f"dtypes: the server takes {sorted(DTYPES)}, and not the client's {missing}"
    if not any(name in transports for name in hello.transports):
        return f"transports: the server has {list(transports)}, the client {hello.transports}"
    return None


def open_channel(
    peer: Peer, hello: Hello, transports: Mapping[TransportName, Transport]
) -> tuple[Transport, ArenaTarget]:
    """Open the first of a client's transports that works; return it and this side's arena."""
    for name in hello.transports:
        if name == "zmq":
            break
        if (transport := transports.get(name)) is None:
            continue
        try:
            target = transport.open(peer, transport.share(min(hello.arena, _MAX_ARENA_BYTES)))
            transport.connect(peer, ArenaTarget(hello.arena, hello.base, hello.offer))
        except TransportError:
            transport.close(peer)
        else:
            return transport, target
    return transports["zmq"], ArenaTarget()


class Clients:
    """The clients of a server, by connection and key."""

    def __init__(
        self,
        socket: ServerSocket,
        transports: Mapping[TransportName, Transport],
        limits: Limits,
        deadlines: ServerDeadlines,
        totals: Totals,
        on_end: Callable[[ClientConnection], None],
    ) -> None:
        """`on_end` is called with each client whose lease ends."""
        self._socket, self._transports, self._totals = socket, transports, totals
        self._limits, self._deadlines, self._on_end = limits, deadlines, on_end
        self._clients: dict[Peer, ClientConnection] = {}
        self._pulses: dict[Peer, ClientConnection] = {}
        self._gone: set[Peer] = set()
        self._beyond: Counter[str] = Counter()  # payloads beyond credit, by key
        self._audit = _Audit()

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(list(self._clients.values()))

    @property
    def held(self) -> int:
        """Bytes that the server holds for all clients, without caches."""
        return sum(client.held for client in self)

    def get(self, peer: Peer) -> ClientConnection | None:
        return self._clients.get(peer)

    def find(self, peer: Peer, generation: int) -> ClientConnection | None:
        """Return the client that sent a message, or answer "Stale" and return None."""
        client = self._clients.get(peer)
        if client is None or client.generation != generation:
            self.send(peer, protocol.Stale(generation))
            return None
        client.seen = time.monotonic()
        return client

    def by_pulse(self, peer: Peer, generation: int, secret: bytes) -> ClientConnection | None:
        """Return the client that gives a sign of life on a second connection, by key and secret."""
        client = self._pulses.get(peer)
        if client is None or client.generation != generation:
            client = next((x for x in self if x.generation == generation), None)
        if client is None or client.peer.key != peer.key:
            return None
        if not compare_digest(client.secret, secret):
            return None
        if client.pulse != peer:
            self._end_pulse(client)
            client.pulse, self._pulses[peer] = peer, client
        client.seen = time.monotonic()
        return client

    def greet(self, peer: Peer, hello: Hello, device: str, cache_room: int, draining: bool) -> None:
        """Grant a lease or refuse it; `cache_room` is how many bytes its caches may have."""
        self.end(peer)
        reason = refusal(hello, self._transports)
        if reason is None and draining:
            reason = "the server is about to leave"
        clients = len(self), self._limits.clients
        if reason is None and not fits(1, self._leases(peer.key), *clients, self._socket.shared):
            reason = f"clients: the server has {len(self)} already of {self._limits.clients}"
        if reason is not None:
            self.refuse(peer, reason)
            return
        transport, target = open_channel(peer, hello, self._transports)
        client = ClientConnection(peer, transport, self._credits(peer.key))
        self._clients[peer] = client
        self._audit.write(logging.INFO, "lease", peer, f"{hello.client} by {transport.name}")
        limits = self._limits
        welcome = protocol.Welcome(
            generation=client.generation,
            secret=client.secret,
            library=library_version(),
            device=device,
            dtypes=list(DTYPES),
            transport=transport.name,
            credits=client.credits,
            tokens=limits.tokens,
            bytes=limits.bytes,
            idle=self._deadlines.idle,
            cache_room=cache_room,
            **target._asdict(),
        )
        self.send(peer, welcome)

    def refuse(self, peer: Peer, reason: str) -> None:
        self._audit.write(logging.WARNING, "refused", peer, reason[:200])
        self.send(peer, protocol.Refused(reason[:200]))

    def _credits(self, key: str) -> int:
        """Return the credits of a key's next client: the n-th one gets the n-th part of all.

        With all credits for each, the payloads of a key with many connections would delay those of
        other keys.
        """
        if not self._socket.shared:
            return self._limits.requests
        return max(1, self._limits.requests // (1 + self._leases(key)))

    def _leases(self, key: str) -> int:
        return sum(client.peer.key == key for client in self)

    def fits(self, key: str, size: int) -> bool:
        """Return whether a key's requests may take `size` more bytes; kept slices are dropped."""
        most, used = self._limits.queued_bytes, sum(client.requested for client in self)
        own = sum(client.requested for client in self if client.peer.key == key)
        if not fits(size, own, used, most, self._socket.shared):
            return False
        if self.held + size > most:
            for client in self:
                if not client.reading:  # otherwise another thread uses them
                    client.kept.clear()
        return self.held + size <= most

    def fail(self, peer: Peer, task: protocol.Task | protocol.StepRequest, reason: str) -> None:
        """Answer that a request has no result."""
        self._totals.refused += 1
        self.send(peer, protocol.Failed(task.generation, task.request, reason[:200]))

    def send(
        self, peer: Peer, message: Message | bytes, *frames: Buffer, track: bool = False
    ) -> list[zmq.MessageTracker]:
        """Send as the socket does, but remember clients that have left, for `end_gone`."""
        data = message if isinstance(message, bytes) else protocol.encode(message)
        trackers = self._socket.send(peer, [data, *frames], track)
        if trackers is None:
            self._gone.add(peer)
        return trackers or []

    def forgive_uncredited(self, peer: Peer) -> None:
        """Count one payload without credit less, because the peer sent a request with credit."""
        self._socket.connections.forgive_uncredited(peer.route)
        if self._beyond[peer.key] > 0:
            self._beyond[peer.key] -= 1

    def count_uncredited(self, peer: Peer, beyond: bool) -> None:
        """Count a payload without credit. After too many, connections end.

        After its lease has ended, a client that reads its answers uses up its credits at most, and
        then waits for another lease. A connection that sends more than that ends. A client with a
        lease never sends a request `beyond` its credits, so these count for all leases of a key
        together, which all end. The key then gets no new connection for some time.
        """
        connections, most = self._socket.connections, self._limits.requests
        count = connections.count_uncredited(peer.route)
        for_key = beyond and self._socket.shared
        if for_key:
            self._beyond[peer.key] += 1
            count = self._beyond[peer.key]
        elif self._socket.shared and count > _DEPTH_OF_POOLS:
            share = most // max(1, connections.number_of(peer.key))
            most = min(most, max(_DEPTH_OF_POOLS, share))
        if count <= most:
            return
        ending = [x.peer for x in self if x.peer.key == peer.key] if for_key else [peer]
        self._beyond.pop(peer.key, None)
        self._socket.ban(peer)
        for each in ending:
            self._audit.write(logging.WARNING, "evicted", each, "it sends payloads without credit")
            self.end(each)
            self._socket.cut(each)

    def give_up(self, client: ClientConnection) -> None:
        """End a lease whose results do not arrive. The client is told and may greet again."""
        self._audit.write(logging.WARNING, "evicted", client.peer, "its results do not arrive")
        self.send(client.peer, protocol.Stale(client.generation))
        self._gone.add(client.peer)

    def end(self, peer: Peer) -> None:
        """End a lease, and free all that the server holds for it."""
        client = self._clients.pop(peer, None)
        if client is not None:
            client.ended = True
            self._end_pulse(client)
            client.transport.close(peer)
            self._on_end(client)

    def end_gone(self) -> None:
        """End the leases of clients that have left."""
        while self._gone:
            peer = self._gone.pop()
            if (client := self._pulses.get(peer)) is not None:
                self._end_pulse(client)
            else:
                self.end(peer)

    def beat(self, now: float, waiting: int, cache_room: Callable[[str], int]) -> None:
        """Give signs of life, with a key's `cache_room`; end leases of silent and revoked keys."""
        self._socket.beat()
        for key in self._socket.refusals():
            self._audit.write(logging.WARNING, "refused", Peer(b"", key), "its key is not trusted")
        for client in self:
            if not self._socket.trusts(client.peer):
                reason = "its key is no longer trusted"
                self._audit.write(logging.WARNING, "evicted", client.peer, reason)
                self.end(client.peer)
                self._socket.cut(client.peer)
            elif now - client.seen > self._deadlines.idle:
                silent = f"nothing was heard of it for {now - client.seen:.1f} s"
                self._audit.write(logging.WARNING, "evicted", client.peer, silent)
                self.end(client.peer)
            else:
                client.settle()
                room = cache_room(client.peer.key)
                pong = protocol.Pong(client.generation, waiting, room)
                for peer in filter(None, (client.peer, client.pulse)):
                    self.send(peer, pong)

    def _end_pulse(self, client: ClientConnection) -> None:
        if client.pulse is not None:
            del self._pulses[client.pulse]
            self._socket.cut(client.pulse)
            client.pulse = None


class _Audit:
    """Writes the audit log. A line names a client by its public key, never by address or secret."""

    def __init__(self) -> None:
        self._until, self._lines, self._dropped = 0.0, 0, 0

    def write(self, level: int, event: str, peer: Peer, detail: str) -> None:
        """Write a line, unless there were 100 in the last 10 s."""
        now = time.monotonic()
        if now > self._until:
            if self._dropped:
                AUDIT.warning("%d lines were left out", self._dropped)
            self._until, self._lines, self._dropped = now + _LOG_SECONDS, 0, 0
        self._lines += 1
        if self._lines > _MAX_LOG_LINES:
            self._dropped += 1
        else:
            client = " ".join(filter(None, [peer.route.hex(), peer.key]))
            AUDIT.log(level, "%s: client %s: %s", event, client, detail)
