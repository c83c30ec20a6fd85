"""A pool's connection to one server, from the handshake to its loss, and anew."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import zmq
from torch import Tensor

from seqpar.servers.pool.payload_channel import Lane
from seqpar.servers.pool.work import Attempt, CachePlace, PendingWork
from seqpar.servers.transport.addresses import is_own
from seqpar.servers.transport.client_socket import DialledSocket
from seqpar.servers.transport.curve_keys import CurveKeys
from seqpar.servers.transport.zeromq import Transport
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import unpack_result
from seqpar.servers.wire.header import DTYPES
from seqpar.servers.wire.limits import LEAST_RATE, PIECE_BYTES
from seqpar.servers.wire.protocol import SECRET_BYTES, Message, TransportName, decode, encode

State = Literal["connecting", "ready", "draining", "refused"]
_RETRY = 0.2  # seconds before another handshake, doubled until
_MAX_RETRY, _MAX_RETRY_OF_OWN = 5.0, 0.4  # the latter of a Unix socket
_SILENCE = 1.0  # seconds: a server gives four signs of life in that time
_PING = 0.1  # seconds between our own
_MAIN_PING = 0.25  # seconds between those on the connection for tasks; a server ends silent ones
_SMOOTHING = 0.3  # of a server's rate, by its last result
_MIN_BUSY, _MAX_BUSY = 0.01, 5.0  # seconds before a busy server is asked again
_MARGIN = 2.0  # times the seconds that payloads should need
_FADING = 0.8  # of the measured bytes per second, with each result
_PIECE_SECONDS = 0.25  # that a frame should need


class ServerLink:
    """The connection to one server, of which one thread makes all calls.

    Attributes:
        address: the server's.
        state: whether it takes tasks; "connecting" also after it was lost.
        reason: why the server refuses this client, or why the connection was lost.
        device: what the server computes on (`hardware_of`).
        attempts: what the server owes an answer, by number.
        rate: work it does in a second, or None.
        blocked_until: when it may be asked again after a busy reply.
        tasks, work: results that were used, and their work.
        cache_room: how many bytes more its caches may have, as far as is known.
        lost: how often the connection was lost.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        address: str,
        keys: CurveKeys | None,
        transports: dict[TransportName, Transport],
        client: tuple[str, str],
        connect_deadline: float,
    ) -> None:
        """`client` is the library's version and this client's name."""
        self.address, self.state, self.reason = address, "connecting", "it has not answered yet"
        self.device = ""
        self.attempts: dict[int, Attempt] = {}
        self.rate: float | None = None
        self.blocked_until, self.last_result = 0.0, 0.0
        self.tasks = self.work = self.lost = self.cache_room = 0
        self._context, self._poller, self._keys = context, poller, keys
        self._client = client
        self._deadline, self._retry, self._again = connect_deadline, _RETRY, math.inf
        self._lane = Lane(transports)
        self._ping, self._main_ping, self._bytes_per_second = 0.0, 0.0, 0.0
        self._dialled: DialledSocket | None = None
        self._pulse: DialledSocket | None = None  # for signs of life, which pass payloads
        self._pulse_answers = False
        self._number = 0
        self._open()

    state: State

    @property
    def sockets(self) -> list[tuple[Any, Any]]:
        """The sockets that a poller says to be readable: for messages, and for events."""
        return [(x.socket, x.monitor) for x in (self._dialled, self._pulse) if x is not None]

    @property
    def transport(self) -> str:
        """The transport of its payloads, or "" if it is not connected."""
        return self._lane.transport if self.state in ("ready", "draining") else ""

    def hurries(self, now: float) -> bool:
        """Return whether payloads are on their way, or may be written, at any moment."""
        return self._lane.moving or (bool(self.attempts) and self._lane.watches(now))

    def free(self, depth: int, now: float) -> bool:
        """Return whether it takes another task, if it has at most `depth` at once."""
        least = min(depth, self._credits)
        return self.state == "ready" and len(self.attempts) < least and now >= self.blocked_until

    @property
    def place(self) -> CachePlace | None:
        """Where a new cache would be, if it takes one."""
        if self.state != "ready":
            return None
        return CachePlace(self.address, self._generation, self._tokens, self._bytes)

    def takes(self, work: PendingWork) -> bool:
        """Return whether a task is within the server's caps."""
        header, form = work.packed.header, work.packed.form
        rows = header.batch * max(header.q_rows, header.k_rows)
        return rows <= self._tokens and max(form.request.room, form.result.room) <= self._bytes

    @property
    def outstanding(self) -> int:
        """The work that it owes an answer."""
        return sum(attempt.work.cost for attempt in self.attempts.values())

    @property
    def allowance(self) -> float:
        """Seconds by which deadlines are longer, since payloads must pass before it can answer."""
        nbytes = sum(map(_bytes_of, self.attempts.values()))
        return _MARGIN * nbytes / max(self._bytes_per_second, LEAST_RATE)

    def start(self, work: PendingWork) -> Attempt | None:
        """Send a task; None if the server cannot be sent to now."""
        self._number += 1
        attempt = Attempt(work, self.address, self._number)
        self.attempts[attempt.number] = attempt
        deadline = attempt.started + self._deadline + self.allowance
        piece = max(PIECE_BYTES, int(_PIECE_SECONDS * self._bytes_per_second))
        self._lane.start(attempt, self._generation, deadline, piece)
        work.attempts.append(attempt)
        return attempt

    def progress(self) -> str | None:
        """Send what follows payloads that have arrived; return why the connection is broken."""
        messages, broken = self._lane.progress()
        for frames in messages:
            if self._dialled is not None:
                broken = self._dialled.send(frames) or broken
        return broken

    def finish(self, attempt: Attempt) -> None:
        """Forget an attempt that is answered, and free its places."""
        passing = min(time.monotonic() - attempt.started, self.allowance)
        attempt.work.passing = max(attempt.work.passing, passing)
        if self.attempts.pop(attempt.number, None) is not None:
            attempt.work.attempts.remove(attempt)
            self._lane.free(attempt)

    def finish_with(
        self, attempt: Attempt, result: protocol.Result, frames: list[Any]
    ) -> list[Tensor]:
        """Return the tensors of a result, copies, and forget the attempt."""
        try:
            buffers = self._lane.read(attempt, result, frames)
            self._measure(attempt, result.seconds)
            return unpack_result(attempt.work.packed.form.result, buffers, result.checksum)
        finally:
            self.finish(attempt)

    def _measure(self, attempt: Attempt, computing: float) -> None:
        """Measure how fast payloads pass: as fast as this one with its result, or faster."""
        seconds = max(1e-3, time.monotonic() - attempt.started - computing)
        sample = _bytes_of(attempt) / seconds
        self._bytes_per_second = max(sample, _FADING * self._bytes_per_second)

    def count(self, attempt: Attempt, now: float) -> None:
        """Count how fast the server is, by a result."""
        work = attempt.work.cost
        seconds = max(1e-6, now - max(attempt.started, self.last_result))
        rate = max(work, 1) / seconds
        self.rate = rate if self.rate is None else self.rate + _SMOOTHING * (rate - self.rate)
        self.last_result = now

    def block(self, seconds: float, now: float) -> None:
        """Ask a busy server again after this time, or after 5 s if it names no sensible one."""
        sensible = seconds if seconds < _MAX_BUSY else _MAX_BUSY  # also for NaN
        self.blocked_until = now + max(_MIN_BUSY, sensible)

    def cancel(self, attempt: Attempt) -> None:
        """Tell the server that an attempt is no longer needed."""
        self._say(protocol.Cancel(self._generation, attempt.number))

    def forget(self, cache: int) -> None:
        """Tell the server that a cache is no longer needed."""
        self._say(protocol.Free(self._generation, cache))

    def receive(self, readable: bool) -> tuple[Message, list[Any]] | None:
        """Return the next message of the server's and its frames, None if there is none.

        Those that were written have arrived; others are read if the socket is readable. Messages of
        the connection's own are dealt with. A ProtocolError says that it is broken.
        """
        if readable:
            self._hear_pulse()
        while (arrived := self._next(readable)) is not None:
            head, *frames = arrived
            message = decode(head)
            self.heard = time.monotonic()
            if isinstance(message, protocol.Welcome | protocol.Refused) and self.state in (
                "ready", "draining"
            ):  # fmt: skip
                raise protocol.ProtocolError("it answered the handshake a second time")
            if isinstance(message, protocol.Welcome):
                self._welcome(message)
            elif isinstance(message, protocol.Refused):
                self._refused(message.reason)
            elif isinstance(message, protocol.Knock):
                if message.under_way:
                    self._lane.hurry()
            elif isinstance(message, protocol.Stale | protocol.Malformed):
                raise protocol.ProtocolError("it no longer knows this client")
            elif getattr(message, "generation", None) != self._generation:
                continue  # of an earlier lease: nobody waits for it
            elif isinstance(message, protocol.Draining):
                self.state, self.reason = "draining", "it is about to leave"
            elif isinstance(message, protocol.Pong):
                self.cache_room = message.cache_room
            else:
                return message, frames
        return None

    def _hear_pulse(self) -> None:
        """Take signs of life that came past payloads.

        A server may be reached through something that sends each connection to another one. Then
        no answer comes, or "Stale", and signs of life stay among other messages.
        """
        while self._pulse is not None and (frames := self._pulse.receive()) is not None:
            message = decode(frames[0])
            if isinstance(message, protocol.Pong) and message.generation == self._generation:
                self._pulse_answers, self.heard = True, time.monotonic()
                self.cache_room = message.cache_room
            else:
                self._end_pulse()

    def _next(self, readable: bool) -> list[Any] | None:
        if self._lane.arrived:
            return [self._lane.arrived.popleft()]
        return self._dialled.receive() if readable and self._dialled is not None else None

    def broken(self) -> str | None:
        """Return why the connection was lost, or None."""
        if self._pulse is not None and self._pulse.broken() is not None:
            self._end_pulse()
        return None if self._dialled is None else self._dialled.broken()

    def beat(self, now: float) -> str | None:
        """Give a sign of life, or shake hands again; return why the connection is broken."""
        if now >= self._again:
            self._open()
        elif self.state == "connecting" and self._dialled is not None:
            if (fault := self._dialled.connect()) is not None:
                self.reason = fault
            elif now - self._opened > max(self._deadline, _SILENCE):  # the answer may be lost
                self.reason = "it has not answered the handshake"
                self._open()
        elif self.state in ("ready", "draining"):
            heard = self.heard if self._dialled is None else max(self.heard, self._dialled.heard)
            if now - heard > max(self._deadline, _SILENCE):
                return f"it has said nothing for {now - heard:.1f} s"
            if now >= self._ping:
                self._ping = now + _PING
                self._give_sign(now)
        return None

    def _give_sign(self, now: float) -> None:
        """Say that this client lives, on both connections."""
        ping = protocol.Ping(self._generation)
        if self._pulse is not None and self._pulse.send([encode(ping, self._session)]) is not None:
            self._end_pulse()
        if not self._pulse_answers or now >= self._main_ping:
            self._main_ping = now + _MAIN_PING
            self._say(ping)

    def lose(self, reason: str) -> list[Attempt]:
        """Drop the connection, to be made again soon; return what it owed an answer."""
        self.lost += self.state in ("ready", "draining")
        self.state, self.reason = "connecting", reason
        owed = list(self.attempts.values())
        for attempt in owed:
            self.finish(attempt)
        self._shut()
        self._again = time.monotonic() + self._retry
        most = _MAX_RETRY_OF_OWN if is_own(self.address) else _MAX_RETRY
        self._retry = min(2 * self._retry, most)
        return owed

    def distrust(self, reason: str) -> list[Attempt]:
        """Drop the connection for good; return what it owed an answer."""
        owed = self.lose(reason)
        self.state, self._again = "refused", math.inf
        return owed

    def close(self) -> None:
        """Leave the server."""
        if self.state in ("ready", "draining"):
            self._say(protocol.Goodbye(self._generation))
        self._shut(linger=100)

    def _open(self) -> None:
        """Make the connection, and ask for a lease."""
        self._shut()
        self._again, self.heard = math.inf, time.monotonic()
        self._opened = self.heard
        self._generation, self._credits, self._tokens, self._bytes = 0, 0, 0, 0
        self._session, self._bytes_per_second = bytes(SECRET_BYTES), 0.0
        self._dialled = self._dial()
        library, client = self._client
        known = {"library": library, "client": client, "dtypes": list(DTYPES)}
        self._say(self._lane.offer(known))

    def _dial(self) -> DialledSocket:
        return DialledSocket(self._context, self._poller, self.address, self._keys, self._deadline)

    def _welcome(self, welcome: protocol.Welcome) -> None:
        if not welcome.credits:
            raise protocol.ProtocolError("it takes no requests: its welcome gives no credits")
        self._generation, self._credits = welcome.generation, welcome.credits
        self._tokens, self._bytes, self.device = welcome.tokens, welcome.bytes, welcome.device
        self.cache_room = welcome.cache_room
        self._session = welcome.secret
        self._lane.agree(welcome)
        self._end_pulse()
        self._pulse = self._dial()
        self.state, self.reason, self._retry = "ready", "", _RETRY
        self.last_result, self.blocked_until = time.monotonic(), 0.0

    def _refused(self, reason: str) -> None:
        self.state, self.reason = "refused", reason
        self._again = time.monotonic() + _MAX_RETRY

    def _say(self, message: Message) -> None:
        data = encode(message, self._session)
        if self._dialled is not None and self._dialled.send([data]) is not None:
            self.heard = -math.inf  # it takes nothing: as if it were silent

    def _end_pulse(self) -> None:
        self._pulse_answers = False
        if self._pulse is not None:
            self._pulse.close(0)
            self._pulse = None

    def _shut(self, linger: int = 0) -> None:
        self._lane.close()
        self._end_pulse()
        if self._dialled is not None:
            self._dialled.close(linger)
            self._dialled = None


def _bytes_of(attempt: Attempt) -> int:
    """Return how many bytes pass for an attempt, there and back."""
    form = attempt.work.packed.form
    return form.request.room + form.result.room
