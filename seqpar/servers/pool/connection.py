"""A pool's connection to one server.

* *Work* is a request to a server: either a task of attention, or a decoding step that appends
  tokens to a cache on the server and computes attention over the cache.
* An *attempt* is work that was sent to one server.
* A *session* is a gRPC call that registers the pool with the server. The server forgets the pool
  when the call ends. The call begins with a handshake, in which the pool identifies itself and the
  server answers with a *welcome*. Afterwards the server sends an *event* with the server's state
  several times per second.
* A *payload* is the bytes of a request's tensors. Payloads and results are sent in gRPC messages.
  With NIXL, the sender writes payloads and results into an *arena* instead, which is a block of the
  receiver's memory.
* A *task call* is a gRPC call that sends one task after another. Between two tasks, it *rests*: it
  stays open, and neither the pool nor the server sends anything in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import grpc
import torch
from torch import Tensor

from seqpar.servers.transport.addresses import is_own
from seqpar.servers.transport.certificates import ClientIdentity
from seqpar.servers.transport.one_sided import ArenaTarget, OneSided, TransportError
from seqpar.servers.transport.options import open_channel
from seqpar.servers.transport.routes import Route
from seqpar.servers.wire import versions
from seqpar.servers.wire.arena import Arena
from seqpar.servers.wire.codec import Packed, pack
from seqpar.servers.wire.limits import LEAST_RATE, LEAVING, MAX_CALL_SECONDS
from seqpar.servers.wire.messages import Places, ReplyHeader
from seqpar.servers.wire.payload import Bytes, Incoming, RequestError, chunks
from seqpar.servers.wire.request import Request
from seqpar.servers.wire.texts import library_version, printable
from seqpar.servers.wire.versions import Version, data_of, joined

Answer = Future[tuple[Tensor, ...]]
AsyncCall = Callable[..., Coroutine[Any, Any, None]]
State = Literal["connecting", "ready", "draining", "refused"]

_log = logging.getLogger("seqpar")
_RETRY_SECONDS = 0.2  # the pause before another session begins; it doubles up to the limits below
_MAX_RETRY_SECONDS, _MAX_UNIX_RETRY_SECONDS = 5.0, 0.4
_EVENT_SECONDS = 0.01  # pause between two events, so that a hostile server cannot keep a pool busy
_SECOND_LOOK_SECONDS = 0.1  # how long to wait once more before a server counts as silent
_MIN_SILENCE_SECONDS = 1.0  # a server that works sends four events in this time
_RATE_SMOOTHING = 0.3  # weight of the latest result in the mean rate of a server
_BUSY_SECONDS = 0.05  # the pause before a busy server is asked again
# Deadlines are extended by this multiple of the time that sending payloads takes.
_PAYLOAD_MARGIN = 2.0
_BANDWIDTH_FADING = 0.8  # with each result, the weight of earlier bandwidths is multiplied by this
_MAX_OPEN_SECONDS = MAX_CALL_SECONDS / 6  # a call that has been open for longer gets no more tasks
# A call that has rested for longer is ended, because a server limits the number of open calls.
_MAX_REST_SECONDS = 60.0
_MAX_REASON = 200  # the most characters that are kept of a server's text
# The gRPC statuses by which a server refuses a session.
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_WRITE_FAILED = "Internal error from Core"  # gRPC's text for a write to a call that has ended


def smoothed_rate(rate: float | None, work: int, seconds: float) -> float:
    """Return the running mean of work per second, after a request of `work` took `seconds`.

    The new value has a weight of 30%. `rate` is the mean before this request, or None for the first
    request.
    """
    last = max(work, 1) / max(1e-6, seconds)
    return last if rate is None else rate + _RATE_SMOOTHING * (last - rate)


class CachePlace(NamedTuple):
    """The server that stores a cache, and the session to which the cache belongs."""

    address: str
    session: bytes  # the secret of the session; a server that was restarted has other sessions
    tokens: int  # the most query rows, and the most key rows, of a request to this server
    bytes: int  # the most bytes of a request's payload, and of its result


@dataclass(eq=False)
class PendingWork:
    """A task or a decoding step that has no result yet. Times are on the monotonic clock."""

    request: Request | None  # the task; None for a decoding step
    packed: Packed
    device: torch.device  # the device on which the result is returned
    cost: int  # the amount of work, in the unit of `Request.work`
    place: CachePlace | None = None  # for a decoding step, the server that stores its cache
    future: Answer = field(default_factory=Future)  # resolved by the first answer
    submitted: float = field(default_factory=time.monotonic)
    # Attempts that the servers can still answer.
    attempts: list[Attempt] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)  # addresses of servers that failed to compute it
    failures: int = 0  # the number of attempts that failed through a server's fault
    reason: str = ""  # why the last attempt failed, or "" before the first attempt
    hedged: bool = False  # whether a second server was asked while the first was still computing
    at_home: bool = False  # whether this process computes or has computed the work
    # An upper bound, in seconds, of the time that the payloads of ended attempts spent on the
    # network.
    passing: float = 0.0

    @classmethod
    def of(cls, request: Request) -> PendingWork:
        """Convert a request to bytes, in the thread that submits the request."""
        return cls(request, pack(request), request.q.device, request.work)

    @property
    def settled(self) -> bool:
        return self.future.done()

    def cancel_attempts(self) -> None:
        for attempt in list(self.attempts):
            attempt.cancel()


@dataclass(eq=False)
class Attempt:
    work: PendingWork
    connection: ServerConnection
    number: int  # the number of the request on this connection
    call: asyncio.Task[None] | None = None  # the coroutine that sends the request and gets a result
    started: float = field(default_factory=time.monotonic)  # when the request was sent
    late: bool = False  # whether another server was asked, because no answer came in time

    def cancel(self) -> None:
        """Cancel the gRPC call of an attempt. An attempt whose call has not begun ends too."""
        if self.call is not None:
            self.call.cancel()
        self.connection.finish(self)

    @property
    def payload_bytes(self) -> int:
        form = self.work.packed.form
        return form.request.room + form.result.room


class ConnectionEvents(Protocol):
    """The methods of a pool that its connections call."""

    def on_result(self, attempt: Attempt, tensors: list[Tensor]) -> None: ...

    def on_failure(self, attempt: Attempt, failure: Failure) -> None: ...

    def on_change(self) -> None:
        """Handle a new state of the connection."""

    def on_error(self, error: BaseException) -> None:
        """Handle an error in a method of this class, or in the connection itself."""


class Failure(NamedTuple):
    reason: str
    blame: bool = False  # whether the server is at fault; other servers are then asked first
    busy: bool = False  # whether the server has too many requests at the moment
    lost: bool = False  # whether the session on this server has ended


@dataclass(eq=False)
class PoolEndpoint:
    name: str  # a name of the pool that is unique among all processes
    identity: ClientIdentity | None
    connect_seconds: float  # the deadline for a handshake, and for the next event of a session
    direct: OneSided | None = None  # the pool's NIXL agent, if the pool uses NIXL
    versions: list[Version] = field(default_factory=lambda: versions.VERSIONS)


class _UnknownVersionError(Exception):
    """The server and this pool have no version of the service in common."""


class TaskCall:
    """A gRPC call that sends one task after another."""

    def __init__(self, stream: Any) -> None:
        self.stream, self._since = stream, time.monotonic()
        self._rests, self._rested = False, 0.0  # whether the call rests, and since when
        # Waits for a message of the server while the call rests.
        self._early: asyncio.Task[bytes] | None = None

    async def write(self, message: bytes) -> None:
        await self.stream.write(message)

    async def read(self) -> bytes:
        if (early := self._early) is None:
            raw: bytes = await self.stream.read()
            return raw
        self._early = None
        return await early

    def rest(self) -> None:
        """Keep the call open for another task. If the server sends something before the pool has
        sent the next task, the call ends.
        """
        self._rests, self._rested = True, time.monotonic()
        self._early = asyncio.ensure_future(self.stream.read())
        self._early.add_done_callback(self._spoil)

    def _spoil(self, early: asyncio.Task[bytes]) -> None:
        """End a call if the server sent something between two tasks, or has ended the call."""
        if not early.cancelled():
            early.exception()  # without this, asyncio would log the error
        # A reply can arrive before gRPC reports that the request was written. In this case, the
        # method is called during a task or during a later rest, and has nothing to end.
        if self._rests and early is self._early:
            self.stream.cancel()

    def may_go_on(self) -> bool:
        now = time.monotonic()
        is_new = now < min(self._since + _MAX_OPEN_SECONDS, self._rested + _MAX_REST_SECONDS)
        return is_new and self._early is not None and not self._early.done()

    def resume(self) -> bool:
        self._rests = False
        return self.may_go_on()

    def cancel(self) -> None:
        self.stream.cancel()
        if self._early is not None:
            self._early.cancel()


class ServerConnection:
    """The connection to one server: a session, and the gRPC calls that send requests. A session is
    a gRPC call that registers the pool with the server, and in which the server reports its state.

    The connection has two network connections, one for the session and one for payloads, so that
    payloads do not delay events. If the session ends, a new session begins after a pause.

    Not thread-safe: the event loop's thread makes every call.
    """

    def __init__(self, address: str, endpoint: PoolEndpoint, events: ConnectionEvents) -> None:
        """`events` has methods that are called when the state of the connection changes, and after
        an error.
        """
        self.address = address
        self.state: State = "connecting"  # also the state after a session was lost
        self.reason = "it has not answered yet"  # why the server is not ready, or ""
        self.device = ""  # the server's hardware, as `hardware_of` describes it
        self.attempts: dict[int, Attempt] = {}  # attempts without an answer, by request number
        self.rate: float | None = None  # work per second, or None before the first result
        self.blocked_until = 0.0  # a busy server is not asked before this time
        self.last_result = 0.0  # when the last result arrived, on the monotonic clock
        self.tasks = 0  # the number of results that were used
        self.work = 0  # the work in the results that were used
        self.lost = 0  # how often the session was lost
        self.cache_room = 0  # bytes that are free for caches, according to the server's last event
        self._endpoint, self._events = endpoint, events
        self._service = endpoint.versions[0]
        self._welcome: Any = None  # the server's welcome, while there is a session
        self._route: Route | None = None  # the route to the server of the session
        self._channel: grpc.aio.Channel | None = None  # the connection for payloads
        self._resting: list[TaskCall] = []  # the call that has rested longest comes first
        self._bytes_per_second = 0.0  # the measured bandwidth of payloads
        # With NIXL, the server writes into `_own_arena`, and this pool into `_server_arena`.
        self._own_arena = self._server_arena = Arena(0)
        self._last_number = 0
        self._silence_seconds = max(endpoint.connect_seconds, _MIN_SILENCE_SECONDS)
        self._retry_seconds = _RETRY_SECONDS
        self._calls: set[asyncio.Task[None]] = set()  # keeps tasks alive, because asyncio does not
        self._keeping = self._run(self._keep_session)

    # --- What the pool asks when it chooses a server ---

    @property
    def is_welcome(self) -> bool:
        return self.state in ("ready", "draining")

    @property
    def transport(self) -> str:
        """The name of the payloads' transport, or "" without a session."""
        if not self.is_welcome:
            return ""
        return "nixl" if self._server_arena.size else "grpc"

    @property
    def place(self) -> CachePlace | None:
        """The server and its current session, where a new cache can be stored. None if the server
        is not ready.
        """
        # Any thread can read this property, because the event loop sets the welcome before the
        # state becomes "ready", and removes the welcome after the state has changed.
        if self.state != "ready" or (welcome := self._welcome) is None:
            return None
        return CachePlace(self.address, welcome.session, welcome.tokens, welcome.bytes)

    @property
    def outstanding(self) -> int:
        """The amount of work that the server has not answered yet."""
        return sum(attempt.work.cost for attempt in self.attempts.values())

    @property
    def allowance(self) -> float:
        """The seconds by which the deadlines of this server's tasks are extended, for sending
        payloads.
        """
        nbytes = sum(attempt.payload_bytes for attempt in self.attempts.values())
        return _PAYLOAD_MARGIN * nbytes / max(self._bytes_per_second, LEAST_RATE)

    def is_free(self, depth: int, now: float) -> bool:
        """Return whether the server is ready, is not busy, and has fewer than `depth` tasks."""
        if self.state != "ready" or now < self.blocked_until:
            return False
        return len(self.attempts) < min(depth, self._welcome.requests)

    def accepts(self, work: PendingWork) -> bool:
        task, form = work.packed.task, work.packed.form
        rows = task.batch * max(task.q_rows, task.k_rows)
        nbytes = max(form.request.room, form.result.room)
        return rows <= self._welcome.tokens and nbytes <= self._welcome.bytes

    def waited(self, attempt: Attempt, now: float) -> float:
        """Return the seconds since the attempt began or, if it was later, since the last result
        arrived.
        """
        return now - max(attempt.started, self.last_result)

    # --- Requests and results ---

    def start(self, work: PendingWork) -> None:
        self._last_number += 1
        attempt = Attempt(work, self, self._last_number)
        self.attempts[attempt.number] = attempt
        work.attempts.append(attempt)
        attempt.call = self._run(self._compute, attempt)

    def _run(self, call: AsyncCall, *arguments: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(_until_cancelled(call, *arguments))
        self._calls.add(task)
        task.add_done_callback(self._forget_call)
        return task

    def _forget_call(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.on_error(error)

    async def _compute(self, attempt: Attempt) -> None:
        try:
            tensors, seconds = await self._result(attempt)
        except grpc.aio.AioRpcError as error:
            failure = self._failure(error)
        except RequestError as error:
            failure = Failure(str(error), blame=True)
        except TransportError as error:
            failure = Failure(str(error), lost=True)
        except asyncio.CancelledError:
            if attempt.call is None or attempt.call.cancelling():
                raise
            failure = Failure("its call has ended", blame=True)  # gRPC has cancelled the call
        except Exception as error:
            failure = Failure(f"its result cannot be read: {type(error).__name__}", blame=True)
        else:
            self._measure_bandwidth(attempt, seconds)
            self.finish(attempt)
            self._events.on_result(attempt, tensors)
            return
        self.finish(attempt)
        if failure.busy:
            self.blocked_until = time.monotonic() + _BUSY_SECONDS
        self._events.on_failure(attempt, failure)

    async def _result(self, attempt: Attempt) -> tuple[list[Tensor], float]:
        assert self._channel is not None
        packed, payload = attempt.work.packed, attempt.work.packed.form.result
        places = self._take_places(packed)
        pieces = iter(()) if places is not None else chunks(packed.parts)
        header = packed.header(self._welcome.session, places)
        call = self._open_call()
        try:
            await call.write(self._service.request(header, next(pieces, ())))
            if places is not None:
                reply, parts = await self._exchange_directly(call, packed, places)
            else:
                for chunk in pieces:
                    await call.write(joined(b"", chunk))
                reply, parts = await self._receive(call, attempt)
            payload.check(parts, reply.checksum ^ self._service.checksum(header))
        # This process wrote to the call after the server had ended it.
        except asyncio.InvalidStateError:
            await self._raise_status(call.stream)
            raise
        except BaseException:
            call.cancel()
            raise
        if reply.open and self.is_welcome:
            call.rest()
            self._resting.append(call)
        else:
            self._run(self._end, call)
        return payload.tensors(parts), reply.seconds

    def _open_call(self) -> TaskCall:
        assert self._channel is not None
        while self._resting:
            call = self._resting.pop()
            if call.resume():
                return call
            call.cancel()
        path = f"/{self._service.service}/Compute"
        return TaskCall(self._channel.stream_stream(path)(timeout=MAX_CALL_SECONDS))

    async def _end(self, call: TaskCall) -> None:
        """Wait until the server ends a call, after the result of the call has arrived."""
        with suppress(Exception):
            async with asyncio.timeout(self._silence_seconds):
                await call.read()
        call.cancel()

    async def _receive(self, call: TaskCall, attempt: Attempt) -> tuple[ReplyHeader, list[Bytes]]:
        payload = attempt.work.packed.form.result
        reply, data = self._service.read_reply(await self._read(call))
        incoming = Incoming(payload, pinned=attempt.work.device.type == "cuda")
        incoming.take(data)
        while incoming.missing:
            incoming.take(data_of(await self._read(call)))
        return reply, incoming.parts

    async def _read(self, call: TaskCall) -> bytes:
        """Return a call's next reply. If the server has ended the call, raise an error with its
        status.
        """
        raw = await call.read()
        if raw is grpc.aio.EOF:
            await self._raise_status(call.stream)
        return raw

    # --- Payloads that NIXL moves ---

    def _take_places(self, packed: Packed) -> Places | None:
        """Reserve memory in the server's arena for a payload, and in this pool's arena for the
        result.

        Returns None if one of the arenas has too little free memory.
        """
        request = self._server_arena.take(packed.form.request.room)
        if request is None:
            return None
        result = self._own_arena.take(packed.form.result.room)
        if result is None:
            self._server_arena.give(request)
            return None
        return Places(request, result)

    async def _exchange_directly(
        self, call: TaskCall, packed: Packed, places: Places
    ) -> tuple[ReplyHeader, list[Bytes]]:
        """Write a payload into the memory of the server, and return the result that the server
        writes.

        A payload is the bytes of a request's tensors. An arena is a block of memory of one side,
        into which the other side writes.

        After a failure or a cancellation, the memory in both arenas stays reserved until the
        session ends.
        """
        direct, server_arena, own_arena = (
            self._endpoint.direct,
            self._server_arena,
            self._own_arena,
        )
        assert direct is not None
        await direct.write(self, packed.parts, places.request)
        await call.write(b"")
        reply, _ = self._service.read_reply(await direct.polling(self._read(call)))
        parts = direct.read(self, packed.form.result.sizes, places.result)
        server_arena.give(places.request)
        own_arena.give(places.result)
        return reply, parts

    async def _raise_status(self, call: Any) -> None:
        code, details = await call.code(), await call.details()
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    def _failure(self, error: grpc.aio.AioRpcError) -> Failure:
        code, details, reason = error.code(), _details(error), _text_of(error)
        # A server that has too many calls cancels some of them. gRPC reports such a call by the
        # status CANCELLED or, if the pool was writing a request, by a failed write.
        shed = code == grpc.StatusCode.CANCELLED or details == _WRITE_FAILED
        if shed or code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Failure(details or "it is busy", busy=True)
        if code == grpc.StatusCode.OK:
            return Failure("its result ended too early", blame=True)
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
            return Failure("it no longer knows this client", lost=True)
        if code == grpc.StatusCode.UNAVAILABLE and details == LEAVING:
            self._drain()  # a server that leaves still answers accepted requests
            return Failure(reason)
        if code == grpc.StatusCode.UNAVAILABLE:
            return Failure(reason, lost=True)
        if code == grpc.StatusCode.NOT_FOUND:
            return Failure("it has lost the cache", blame=True)
        return Failure(reason, blame=True)

    def finish(self, attempt: Attempt) -> None:
        passing = min(time.monotonic() - attempt.started, self.allowance)
        attempt.work.passing = max(attempt.work.passing, passing)
        if self.attempts.pop(attempt.number, None) is not None:
            attempt.work.attempts.remove(attempt)

    def count(self, attempt: Attempt, now: float) -> None:
        self.rate = smoothed_rate(self.rate, attempt.work.cost, self.waited(attempt, now))
        self.last_result = now

    def count_used(self, work: PendingWork) -> None:
        self.tasks += 1
        self.work += work.cost

    def forget(self, cache: int) -> None:
        if self._channel is not None:
            request = self._service.messages.FreeRequest(session=self._welcome.session, cache=cache)
            free = self._channel.unary_unary(f"/{self._service.service}/Free")
            self._run(self._quietly, free, request.SerializeToString())

    async def _quietly(self, call: Callable[..., Any], request: bytes) -> None:
        """Make a call that frees a cache, and ignore its failure."""
        with suppress(Exception):
            await call(request, timeout=self._silence_seconds)

    def _measure_bandwidth(self, attempt: Attempt, computing: float) -> None:
        seconds = max(1e-3, time.monotonic() - attempt.started - computing)
        faded = _BANDWIDTH_FADING * self._bytes_per_second
        self._bytes_per_second = max(attempt.payload_bytes / seconds, faded)

    # --- The session ---

    async def _keep_session(self, after: float = 0.0) -> None:
        """Wait `after` seconds, and begin a session. When a session ends, begin a new session."""
        await asyncio.sleep(after)
        while True:
            refused = False
            try:
                await self._session()
                reason = "it has left"
            except grpc.aio.AioRpcError as error:
                refused = not self.is_welcome and error.code() in _REFUSALS
                reason = _text_of(error)
            except _UnknownVersionError as error:
                refused, reason = True, str(error)
            except (RequestError, OSError) as error:
                reason = str(error)
            except TimeoutError:
                silent = f"it has said nothing for {self._silence_seconds:.1f} s"
                reason = silent if self.is_welcome else "it has not answered the handshake"
            except Exception as error:
                reason = f"its session has failed: {type(error).__name__}"
            self.lose(reason)
            if refused:
                self.state = "refused"
                self._events.on_change()
            await asyncio.sleep(_MAX_RETRY_SECONDS if refused else self._retry_seconds)
            most = _MAX_UNIX_RETRY_SECONDS if is_own(self.address) else _MAX_RETRY_SECONDS
            self._retry_seconds = min(2 * self._retry_seconds, most)

    async def _session(self) -> None:
        if (identity := self._endpoint.identity) is not None:
            identity.look()
            for fault in identity.faults():
                _log.warning("%s", fault)
        self._route = Route(self.address, self._endpoint.identity is not None)
        async with self._dial() as channel:
            call, first = await self._greet(channel)
            if not first.HasField("welcome") or not first.welcome.requests:
                raise RequestError("it takes no requests: its welcome gives none")
            self._take_state(await self._event(call))
            self._begin(first.welcome)
            while True:
                await asyncio.sleep(_EVENT_SECONDS)
                self._take_state(await self._event(call))

    def _take_state(self, event: Any) -> None:
        if not event.HasField("state"):
            raise RequestError("it answered the handshake a second time")
        while self._resting and not self._resting[0].may_go_on():
            self._resting.pop(0).cancel()
        self.cache_room = event.state.cache_room
        if event.state.draining:
            self._drain()

    def _drain(self) -> None:
        if self.state == "ready":
            self.state, self.reason = "draining", "it is about to leave"
            self._events.on_change()

    async def _greet(self, channel: grpc.aio.Channel) -> tuple[Any, Any]:
        """Begin a session in the newest version of the service that the server knows.

        Returns the gRPC call of the session, and the first event that the server sent.
        """
        direct = self._endpoint.direct
        arena = None if direct is None else direct.open(self)
        self._own_arena = Arena(0 if arena is None else arena.size)
        for version in self._endpoint.versions:
            self._service = version
            request = version.messages.SessionRequest(
                library=library_version(), client=self._endpoint.name
            )
            if arena is not None:
                request.arena.MergeFrom(version.messages.Arena(**arena._asdict()))
            ask = channel.unary_stream(f"/{version.service}/Session")
            call = ask(request.SerializeToString())
            try:
                return call, await self._event(call)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                    raise
        known = ", ".join(version.service for version in self._endpoint.versions)
        raise _UnknownVersionError(f"version: the server has none of {known}")

    async def _event(self, call: Any) -> Any:
        read = asyncio.ensure_future(call.read())
        try:
            # If this process was stopped for a while, unread events can be in its socket. It
            # therefore waits a second time before it regards the server as silent.
            for seconds in (self._silence_seconds, _SECOND_LOOK_SECONDS):
                await asyncio.wait([read], timeout=seconds)
            if not read.done():
                raise TimeoutError
        finally:
            read.cancel()  # has no effect if the read has ended
        if (raw := await read) is grpc.aio.EOF:
            await self._raise_status(call)
        return self._service.read(self._service.messages.SessionEvent, raw)

    def _dial(self) -> grpc.aio.Channel:
        assert self._route is not None
        return open_channel(self._route, self._endpoint.identity, self._endpoint.connect_seconds)

    def _begin(self, welcome: Any) -> None:
        self._welcome, self._channel = welcome, self._dial()
        if (direct := self._endpoint.direct) is not None and welcome.HasField("arena"):
            theirs = welcome.arena
            with suppress(TransportError):  # payloads are then sent in gRPC messages
                direct.connect(self, ArenaTarget(theirs.agent, theirs.address, theirs.size))
                self._server_arena = Arena(theirs.size)
        self.device = printable(welcome.device)[:_MAX_REASON]
        if welcome.library != library_version():  # different versions can round differently
            self.device += f", seqpar {printable(welcome.library)[:_MAX_REASON]}"
        self.state, self.reason = "ready", ""
        self._retry_seconds = _RETRY_SECONDS
        self.last_result, self.blocked_until = time.monotonic(), 0.0
        self._events.on_change()

    def lose(self, reason: str) -> None:
        self.lost += self.is_welcome
        self.state, self.reason, self._welcome = "connecting", reason, None
        unanswered = list(self.attempts.values())
        for attempt in unanswered:
            attempt.cancel()
        self._end_resting()
        self._server_arena = Arena(0)
        if self._endpoint.direct is not None:
            self._endpoint.direct.close(self)
        self._run(_close, self._channel, self._route)
        self._channel = self._route = None
        for attempt in unanswered:
            self._events.on_failure(attempt, Failure(reason))
        self._events.on_change()

    def _end_resting(self) -> None:
        while self._resting:
            self._resting.pop().cancel()

    def restart(self, reason: str) -> None:
        self._keeping.cancel()
        self.lose(reason)
        self._keeping = self._run(self._keep_session, _RETRY_SECONDS)

    def distrust(self, reason: str) -> None:
        self._keeping.cancel()
        self.lose(reason)
        self.state = "refused"

    async def close(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        self._end_resting()
        await asyncio.gather(*calls, return_exceptions=True)
        await _close(self._channel, self._route)


async def _until_cancelled(call: AsyncCall, *arguments: Any) -> None:
    """Run a call, and return normally if the call is cancelled.

    If CancelledError left the coroutine, it would create a reference cycle, and the socket and
    payload of the call would stay in memory until Python's garbage collector runs.
    """
    with suppress(asyncio.CancelledError):
        await call(*arguments)


async def _close(channel: grpc.aio.Channel | None, route: Route | None) -> None:
    if channel is not None:
        await channel.close()
    if route is not None:
        route.close()


def _details(error: grpc.aio.AioRpcError) -> str:
    return printable(error.details() or "")[:_MAX_REASON]


def _text_of(error: grpc.aio.AioRpcError) -> str:
    return _details(error) or error.code().name.lower().replace("_", " ")
