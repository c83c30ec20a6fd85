"""A pool's connection to one server, and the tasks and cache steps that it sends."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import zmq
from torch import Tensor

from seqpar.servers.transport.addresses import is_own
from seqpar.servers.transport.client_socket import ClientSocket
from seqpar.servers.transport.curve_keys import CurveKeys
from seqpar.servers.transport.zeromq import (
    WATCHING,
    ArenaTarget,
    Frames,
    Sending,
    Transport,
    TransportError,
    pieces,
)
from seqpar.servers.wire import protocol
from seqpar.servers.wire.arena import Arena
from seqpar.servers.wire.codec import Packed, pack, unpack_result
from seqpar.servers.wire.header import DTYPES
from seqpar.servers.wire.limits import LEAST_RATE, PIECE_BYTES
from seqpar.servers.wire.payload import Frame
from seqpar.servers.wire.protocol import Message, TransportName, decode, encode
from seqpar.servers.wire.request import Request

Answer = Future[tuple[Tensor, ...]]
State = Literal["connecting", "ready", "draining", "refused"]

_MAX_SOCKETS = 2**12  # of ZeroMQ's; a server needs six
_MAX_ARENA_BYTES = 2**26  # per server, for results that the server writes directly
_RETRY_SECONDS = 0.2  # before another handshake; doubles up to the next line's limit
_MAX_RETRY_SECONDS, _MAX_UNIX_RETRY_SECONDS = 5.0, 0.4
_MIN_SILENCE_SECONDS = 1.0  # a live server gives four signs of life in this time
_PULSE_SECONDS = 0.1  # between two signs of life on the second socket
_MAIN_PING_SECONDS = 0.25  # between two on the first; a server ends silent connections
_RATE_SMOOTHING = 0.3  # weight of the last result in a server's rate
_MIN_BUSY_SECONDS, _MAX_BUSY_SECONDS = 0.01, 5.0  # before a busy server is asked again
_PAYLOAD_MARGIN = 2.0  # times the seconds that payloads should need
_BANDWIDTH_FADING = 0.8  # of the measured bytes per second, with each result
_PIECE_SECONDS = 0.25  # that one frame of a payload should need
_NO_LEASE = protocol.Welcome(0, bytes(protocol.SECRET_BYTES), "", "", [], "zmq", 0, 0, 0, 0.0, 0)


def smoothed_rate(rate: float | None, work: int, seconds: float) -> float:
    """Return a rate in work per second, to which the last work contributes 30%."""
    last = max(work, 1) / max(1e-6, seconds)
    return last if rate is None else rate + _RATE_SMOOTHING * (last - rate)


class CachePlace(NamedTuple):
    """The server and lease under which a cache is stored."""

    address: str
    generation: int  # of the lease; a server that was restarted grants another one
    tokens: int  # of the largest request that the server accepts
    bytes: int  # of the largest request, or result


@dataclass(eq=False)
class PendingWork:
    """A task or a cache step without a result. Times are on the monotonic clock."""

    request: Request | None  # the task; None for a cache step
    packed: Packed
    device: torch.device  # where the result is returned
    cost: int  # its work, in the unit of `Request.work`
    place: CachePlace | None = None  # for a cache step, the only place that can compute it
    future: Answer = field(default_factory=Future)  # resolved by the first answer
    submitted: float = field(default_factory=time.monotonic)
    attempts: list[Attempt] = field(default_factory=list)  # that the servers may still answer
    avoid: set[str] = field(default_factory=set)  # addresses of servers that failed to compute it
    failures: int = 0  # of attempts, by servers
    reason: str = "no server was ready"  # why the last attempt failed
    hedged: bool = False  # whether a second server was asked while the first was still computing
    at_home: bool = False  # whether this process computes it or has computed it
    passing: float = 0.0  # seconds that payloads of an ended attempt may have spent on the network

    @classmethod
    def of(cls, request: Request) -> PendingWork:
        """Pack a task. This takes a while, so the caller's thread does it."""
        return cls(request, pack(request), request.q.device, request.work)

    @property
    def settled(self) -> bool:
        """Whether it has a result or was cancelled."""
        return self.future.done()

    def cancel_attempts(self) -> None:
        for attempt in self.attempts:
            if not attempt.late:
                attempt.connection.cancel(attempt)


@dataclass(eq=False)
class Attempt:
    """A task or step that was sent to one server."""

    work: PendingWork
    connection: ServerConnection
    number: int  # of the request on this connection
    place: int | None = None  # the offset in the server's arena; None for frames
    result_place: int | None = None  # the offset in ours
    started: float = field(default_factory=time.monotonic)  # when it was sent
    late: bool = False  # given up; the server may still answer, and the places stay taken

    @property
    def payload_bytes(self) -> int:
        form = self.work.packed.form
        return form.request.room + form.result.room


@dataclass(eq=False)
class PoolEndpoint:
    """The client side of a pool, shared by all of its connections."""

    name: str  # unique among all processes
    keys: CurveKeys | None
    transports: dict[TransportName, Transport]  # the preferred one first
    connect_seconds: float  # the deadline of a handshake, and of a server's sign of life
    writes_afar: bool  # whether one-sided writes may leave Unix sockets
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    poller: zmq.Poller = field(default_factory=zmq.Poller)

    def __post_init__(self) -> None:
        self.context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)

    def close(self) -> None:
        for transport in self.transports.values():
            transport.shutdown()
        self.context.term()


@dataclass(eq=False)
class _Session:
    """State that begins with a handshake and ends when the connection is lost."""

    transport: Transport  # of payloads; frames until the server's welcome names another one
    own_arena: Arena = field(default_factory=lambda: Arena(0))  # to which the server may write
    server_arena: Arena = field(default_factory=lambda: Arena(0))  # to which this side may write
    lease: protocol.Welcome = _NO_LEASE
    bytes_per_second: float = 0.0  # the measured rate of payloads
    sendings: list[Sending] = field(default_factory=list)
    written: deque[bytes] = field(default_factory=deque)  # by the server directly, not yet read
    # Whether the last result took so little time that the server now looks for our next write
    # without being woken.
    last_was_brief: bool = False
    look_until: float = 0.0  # until then this side looks for direct replies without being woken
    server_looks_until: float = 0.0  # until then the server looks for direct requests


class ServerConnection:
    """A pool's connection to one server: its sockets, its payloads, and whether it is alive.

    Control messages travel through ZeroMQ. Tensors travel by one-sided writes if both sides have
    NIXL, otherwise as frames of the same socket. A second socket carries nothing but signs of life,
    so these never wait for a payload. A connection that is lost is made again after a pause.

    Not thread-safe: the pool's thread makes every call.
    """

    def __init__(self, address: str, endpoint: PoolEndpoint) -> None:
        self.address = address
        self.state: State = "connecting"  # also after the connection was lost
        self.reason = "it has not answered yet"  # why it is not ready, or ""
        self.device = ""  # the server's hardware, as `hardware_of` describes it
        self.attempts: dict[int, Attempt] = {}  # without an answer, by request number
        self.rate: float | None = None  # work per second, after the first result
        self.blocked_until = 0.0  # when it may be asked again after a busy reply
        self.last_result = 0.0  # when its last result arrived, on the monotonic clock
        self.tasks = 0  # results that were used
        self.work = 0  # of these results
        self.lost = 0  # how often the connection was lost
        self.cache_room = 0  # bytes that are free for caches, as the server last reported
        self._endpoint = endpoint
        self._transports = dict(endpoint.transports)
        if not (endpoint.writes_afar or is_own(address)):
            self._transports.pop("nixl", None)
        self._frames = Frames()
        self._session = _Session(self._frames)
        self._last_number = 0
        self._silence_seconds = max(endpoint.connect_seconds, _MIN_SILENCE_SECONDS)
        self._retry_seconds = _RETRY_SECONDS
        self._next_handshake = math.inf
        self._next_pulse = 0.0
        self._next_main_ping = 0.0
        self._heard = 0.0
        self._opened = 0.0
        self._main: ClientSocket | None = None
        self._pulse: ClientSocket | None = None
        self._pulse_answers = False
        self._open()

    # --- What the pool asks when it chooses a server ---

    @property
    def is_welcome(self) -> bool:
        """Whether the server has granted a lease that still holds."""
        return self.state in ("ready", "draining")

    @property
    def transport(self) -> str:
        """The name of the payloads' transport, or "" without a lease."""
        return self._session.transport.name if self.is_welcome else ""

    @property
    def place(self) -> CachePlace | None:
        """The place of a new cache on this server, or None if the server is not ready."""
        lease = self._session.lease
        if self.state != "ready":
            return None
        return CachePlace(self.address, lease.generation, lease.tokens, lease.bytes)

    @property
    def outstanding(self) -> int:
        """Work that the server has not answered yet."""
        return sum(attempt.work.cost for attempt in self.attempts.values())

    @property
    def allowance(self) -> float:
        """Seconds by which payloads on the network extend the deadlines of this server's tasks."""
        nbytes = sum(attempt.payload_bytes for attempt in self.attempts.values())
        return _PAYLOAD_MARGIN * nbytes / max(self._session.bytes_per_second, LEAST_RATE)

    def is_free(self, depth: int, now: float) -> bool:
        """Return whether the server accepts another task now, with at most `depth` at a time."""
        most = min(depth, self._session.lease.credits)
        return self.state == "ready" and len(self.attempts) < most and now >= self.blocked_until

    def accepts(self, work: PendingWork) -> bool:
        """Return whether a task is within the server's caps."""
        header, form = work.packed.header, work.packed.form
        rows = header.batch * max(header.q_rows, header.k_rows)
        nbytes = max(form.request.room, form.result.room)
        return rows <= self._session.lease.tokens and nbytes <= self._session.lease.bytes

    def waited(self, attempt: Attempt, now: float) -> float:
        """Return the seconds since the server got an attempt or answered another one."""
        return now - max(attempt.started, self.last_result)

    def needs_polling(self, now: float) -> bool:
        """Return whether a one-sided write is in progress or may arrive without waking us."""
        session = self._session
        return bool(session.sendings) or (bool(self.attempts) and now < session.look_until)

    # --- Requests and results ---

    def start(self, work: PendingWork) -> None:
        """Begin to send a task or step; `progress` continues."""
        session = self._session
        self._last_number += 1
        attempt = Attempt(work, self, self._last_number)
        self.attempts[attempt.number] = attempt
        transport: Transport = self._frames
        if session.transport.name != "zmq" and self._take_room(attempt):
            transport = session.transport
        watching = WATCHING if session.last_was_brief else 0.0
        session.look_until = attempt.started + watching
        header = work.packed.numbered(
            session.lease.generation,
            attempt.number,
            place=attempt.place,
            result_place=attempt.result_place,
            watching=watching,
        )
        message = encode(header, session.lease.secret)
        deadline = attempt.started + self._endpoint.connect_seconds + self.allowance
        sending = transport.begin(
            Sending(self, message, deadline), work.packed.parts, attempt.place
        )
        piece = max(PIECE_BYTES, int(_PIECE_SECONDS * session.bytes_per_second))
        sending.frames = pieces(sending.frames, piece)
        session.sendings.append(sending)
        work.attempts.append(attempt)

    def progress(self) -> str | None:
        """Continue to send payloads; return why the connection is broken, or None."""
        session = self._session
        broken = None
        for sending in session.sendings:
            session.transport.progress(sending)
            broken = sending.error or broken
            frames = sending.due(session.server_looks_until)
            if frames and self._main is not None:
                broken = self._main.send(frames) or broken
        session.sendings = [sending for sending in session.sendings if sending.moving]
        return broken

    def take_result(
        self, attempt: Attempt, result: protocol.Result, frames: Sequence[Frame]
    ) -> list[Tensor]:
        """Finish an attempt; return copies of its result.

        Raise a RequestError or a TransportError if the payload is damaged or not in its place.
        """
        session, payload = self._session, attempt.work.packed.form.result
        session.last_was_brief = result.watching > 0
        session.server_looks_until = time.monotonic() + result.watching
        transport = self._frames if attempt.result_place is None else session.transport
        try:
            buffers = transport.read(self, frames, payload.sizes, attempt.result_place)
            self._measure_bandwidth(attempt, result.seconds)
            pinned = attempt.work.device.type == "cuda"
            return unpack_result(payload, buffers, result.checksum, pinned)
        finally:
            self.finish(attempt)

    def finish(self, attempt: Attempt) -> None:
        passing = min(time.monotonic() - attempt.started, self.allowance)
        attempt.work.passing = max(attempt.work.passing, passing)
        if self.attempts.pop(attempt.number, None) is not None:
            attempt.work.attempts.remove(attempt)
            if attempt.place is not None and attempt.result_place is not None:
                self._session.server_arena.give(attempt.place)
                self._session.own_arena.give(attempt.result_place)

    def count(self, attempt: Attempt, now: float) -> None:
        self.rate = smoothed_rate(self.rate, attempt.work.cost, self.waited(attempt, now))
        self.last_result = now

    def credit(self, work: PendingWork) -> None:
        """Count a result that was used."""
        self.tasks += 1
        self.work += work.cost

    def block(self, seconds: float, now: float) -> None:
        """Leave a busy server in peace for the seconds that it names, from 0.01 to 5."""
        # The comparison is false for NaN, which then counts as the maximum.
        sensible = seconds if seconds < _MAX_BUSY_SECONDS else _MAX_BUSY_SECONDS
        self.blocked_until = now + max(_MIN_BUSY_SECONDS, sensible)

    def cancel(self, attempt: Attempt) -> None:
        attempt.late = True
        self._send(protocol.Cancel(self._session.lease.generation, attempt.number))

    def forget(self, cache: int) -> None:
        self._send(protocol.Free(self._session.lease.generation, cache))

    def _take_room(self, attempt: Attempt) -> bool:
        """Take room for a payload and for its result, or for neither."""
        form, session = attempt.work.packed.form, self._session
        place = session.server_arena.take(form.request.room)
        if place is None:
            return False
        result_place = session.own_arena.take(form.result.room)
        if result_place is None:
            session.server_arena.give(place)
            return False
        attempt.place, attempt.result_place = place, result_place
        return True

    def _measure_bandwidth(self, attempt: Attempt, computing: float) -> None:
        """Update the measured rate of payloads; the server computed this attempt in `computing`."""
        seconds = max(1e-3, time.monotonic() - attempt.started - computing)
        faded = _BANDWIDTH_FADING * self._session.bytes_per_second
        self._session.bytes_per_second = max(attempt.payload_bytes / seconds, faded)

    # --- Messages from the server ---

    def is_readable(self, ready: Set[object]) -> bool:
        """Return whether a poll that returned `ready` found something to read."""
        sockets = [x for x in (self._main, self._pulse) if x is not None]
        return self.has_events(ready) or any(x.socket in ready for x in sockets)

    def has_events(self, ready: Set[object]) -> bool:
        """Return whether a poll found connections or disconnections."""
        return any(x.monitor in ready for x in (self._main, self._pulse) if x is not None)

    def take_written(self, message: bytes) -> None:
        self._session.written.append(message)

    def receive(self, readable: bool) -> tuple[Message, list[Frame]] | None:
        """Return the next message for the pool and its frames, or None.

        Handles messages about the connection itself. The socket is read only if it is readable.
        A ProtocolError says that the connection must be given up.
        """
        if readable:
            self._read_pulse()
        while (arrived := self._next(readable)) is not None:
            head, *frames = arrived
            message = decode(head)
            self._heard = time.monotonic()
            if isinstance(message, protocol.Welcome | protocol.Refused) and self.is_welcome:
                raise protocol.ProtocolError("it answered the handshake a second time")
            if isinstance(message, protocol.Welcome):
                self._welcome(message)
            elif isinstance(message, protocol.Refused):
                self.state, self.reason = "refused", message.reason
                self._next_handshake = time.monotonic() + _MAX_RETRY_SECONDS
            elif isinstance(message, protocol.Knock):
                if message.under_way:
                    self._session.transport.hurry()
            elif isinstance(message, protocol.Stale | protocol.Malformed):
                raise protocol.ProtocolError("it no longer knows this client")
            elif getattr(message, "generation", None) != self._session.lease.generation:
                continue  # it belongs to an earlier lease
            elif isinstance(message, protocol.Draining):
                self.state, self.reason = "draining", "it is about to leave"
            elif isinstance(message, protocol.Pong):
                self.cache_room = message.cache_room
            else:
                return message, frames
        return None

    def _next(self, readable: bool) -> list[Frame] | None:
        if self._session.written:
            return [self._session.written.popleft()]
        return self._main.receive() if readable and self._main is not None else None

    def _read_pulse(self) -> None:
        """Read answers to the signs of life on the second socket."""
        while self._pulse is not None and (frames := self._pulse.receive()) is not None:
            message = decode(frames[0])
            generation = self._session.lease.generation
            if isinstance(message, protocol.Pong) and message.generation == generation:
                self._pulse_answers = True
                self._heard = time.monotonic()
                self.cache_room = message.cache_room
            else:
                # A proxy may connect each socket to another server, which then answers "Stale" or
                # nothing. Signs of life then stay on the first socket.
                self._end_pulse()

    # --- Handshake and liveness ---

    def beat(self, now: float) -> str | None:
        """Give a sign of life or shake hands again; return why the connection is broken."""
        if now >= self._next_handshake:
            self._open()
        elif self.state == "connecting" and self._main is not None:
            if (fault := self._main.connect()) is not None:
                self.reason = fault
            elif now - self._opened > self._silence_seconds:  # the answer may have been lost
                self.reason = "it has not answered the handshake"
                self._open()
        elif self.is_welcome:
            heard = self._heard if self._main is None else max(self._heard, self._main.heard)
            if now - heard > self._silence_seconds:
                return f"it has said nothing for {now - heard:.1f} s"
            if now >= self._next_pulse:
                self._next_pulse = now + _PULSE_SECONDS
                self._give_sign_of_life(now)
        return None

    def broken(self) -> str | None:
        if self._pulse is not None and self._pulse.broken() is not None:
            self._end_pulse()
        return None if self._main is None else self._main.broken()

    def lose(self, reason: str) -> list[Attempt]:
        """Drop the connection, to be made again soon; return the attempts without an answer."""
        self.lost += self.is_welcome
        self.state, self.reason = "connecting", reason
        unanswered = list(self.attempts.values())
        for attempt in unanswered:
            self.finish(attempt)
        self._shut()
        self._next_handshake = time.monotonic() + self._retry_seconds
        most = _MAX_UNIX_RETRY_SECONDS if is_own(self.address) else _MAX_RETRY_SECONDS
        self._retry_seconds = min(2 * self._retry_seconds, most)
        return unanswered

    def distrust(self, reason: str) -> list[Attempt]:
        """Drop the connection for good; return the attempts without an answer."""
        unanswered = self.lose(reason)
        self.state, self._next_handshake = "refused", math.inf
        return unanswered

    def close(self) -> None:
        if self.is_welcome:
            self._send(protocol.Goodbye(self._session.lease.generation))
        self._shut(linger=100)

    def _open(self) -> None:
        """Connect, and ask for a lease."""
        self._shut()
        self._next_handshake = math.inf
        self._heard = self._opened = time.monotonic()
        try:
            self._main = self._dial()
        except zmq.ZMQError as error:
            self.reason = f"it cannot be connected to: {error}"
            self._next_handshake = self._opened + _RETRY_SECONDS
            return
        target = ArenaTarget()
        names: list[TransportName] = []
        for name, transport in self._transports.items():
            target = transport.open(self, transport.share(_MAX_ARENA_BYTES))
            if target.arena or name == "zmq":
                names.append(name)
            if target.arena:
                break
        self._session.own_arena = Arena(target.arena)
        hello = protocol.Hello(
            library=protocol.library_version(),
            client=self._endpoint.name,
            transports=list(dict.fromkeys([*names, "zmq"])),
            dtypes=list(DTYPES),
            **target._asdict(),
        )
        self._send(hello)

    def _dial(self) -> ClientSocket:
        shared = self._endpoint
        return ClientSocket(
            shared.context, shared.poller, self.address, shared.keys, shared.connect_seconds
        )

    def _welcome(self, welcome: protocol.Welcome) -> None:
        if not welcome.credits:
            raise protocol.ProtocolError("it takes no requests: its welcome gives no credits")
        session = self._session
        session.lease = welcome
        session.server_arena = Arena(welcome.arena)
        session.transport = self._transports.get(welcome.transport, self._frames)
        try:
            target = ArenaTarget(welcome.arena, welcome.base, welcome.offer)
            session.transport.connect(self, target)
        except TransportError:
            session.transport = self._frames
        self.device, self.cache_room = welcome.device, welcome.cache_room
        self._end_pulse()
        with suppress(zmq.ZMQError):  # then signs of life stay on the first socket
            self._pulse = self._dial()
        self.state, self.reason = "ready", ""
        self._retry_seconds = _RETRY_SECONDS
        self.last_result, self.blocked_until = time.monotonic(), 0.0

    def _give_sign_of_life(self, now: float) -> None:
        ping = protocol.Ping(self._session.lease.generation)
        data = encode(ping, self._session.lease.secret)
        if self._pulse is not None and self._pulse.send([data]) is not None:
            self._end_pulse()
        if not self._pulse_answers or now >= self._next_main_ping:
            self._next_main_ping = now + _MAIN_PING_SECONDS
            self._send(ping)

    def _send(self, message: Message) -> None:
        data = encode(message, self._session.lease.secret)
        if self._main is not None and self._main.send([data]) is not None:
            self._heard = -math.inf  # a server that accepts nothing counts as silent

    def _end_pulse(self) -> None:
        self._pulse_answers = False
        if self._pulse is not None:
            self._pulse.close(0)
            self._pulse = None

    def _shut(self, linger: int = 0) -> None:
        for transport in self._transports.values():
            transport.close(self)
        self._session = _Session(self._frames)
        self._end_pulse()
        if self._main is not None:
            self._main.close(linger)
            self._main = None
