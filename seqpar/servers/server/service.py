"""The gRPC service of an attention server: sessions, tasks, decoding steps with caches, and the
status.

A call is checked before it has any effect. The server reads a *payload*, the bytes of a request's
tensors, only when enough memory is free for the client (`account.py`). Until then, gRPC's flow
control makes the sender wait. When a call ends, for whatever reason, its memory is freed.

A *name* is the name in a client's certificate. An *open* call can send several tasks, one after
another. Only a few calls with the same name may receive data at the same time. The permission to
receive data is called a *turn*.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import grpc
import torch

from seqpar.attention.backend import DEFAULT
from seqpar.servers.server.account import Account, TooManyError, Turns
from seqpar.servers.server.audit import Audit
from seqpar.servers.server.caches import CacheLost, Caches, CacheStep
from seqpar.servers.server.callers import Caller, Callers
from seqpar.servers.server.compute import hardware_of, kind_of
from seqpar.servers.server.counters import Status, Totals
from seqpar.servers.server.sessions import (
    FullError,
    LeavingError,
    Session,
    Sessions,
    StaleSessionError,
    UntrustedError,
)
from seqpar.servers.server.worker import ComputationError, ComputeJob, Worker, trim
from seqpar.servers.transport.one_sided import ArenaTarget, OneSided, TransportError
from seqpar.servers.wire.codec import KeptSlices, unpack
from seqpar.servers.wire.header import form_of
from seqpar.servers.wire.limits import (
    LEAST_RATE,
    LEAVING,
    MAX_CALL_SECONDS,
    Limits,
    ServerDeadlines,
)
from seqpar.servers.wire.messages import Places, ReplyHeader, RequestHeader
from seqpar.servers.wire.payload import Buffer, Bytes, Incoming, RequestError, chunks
from seqpar.servers.wire.request import Request
from seqpar.servers.wire.texts import library_version
from seqpar.servers.wire.versions import Version, data_of, joined

Context: TypeAlias = Any  # a grpc.aio.ServicerContext, which has no type hints
BEAT_SECONDS = 0.25  # a session has an event at least this often
_CHUNKS_AT_ONCE = 2  # how many chunks of payloads the server receives from a name at a time
_FIRST_REQUESTS_AT_ONCE = (
    1  # how many first requests of `Compute` it receives from a name at a time
)
# How many requests of all other calls it receives from a name at a time.
_CONTROL_REQUESTS_AT_ONCE = 4
_OPEN_CALLS, _ALL_OPEN_CALLS = 8, 128  # the most open calls of one name, and of all names together
_PATIENCE_SECONDS = 0.25  # how long a call keeps its turn while no chunk arrives
_PAUSE_SECONDS = 0.005  # the delay of refused calls and of the calls `Session`, `Free` and `Status`
_READERS = 8  # the number of threads that check payloads
# An estimate of the memory of attention with a mask: `_MASK_BYTES` for each pair of a query row and
# a key row, with at most `_MASK_ROWS` query rows at a time.
_MASK_ROWS, _MASK_BYTES = 768, 12
# A payload within both limits is checked in the event loop's thread, and a larger one in a separate
# thread.
_SMALL_PAYLOAD_BYTES, _FEW_SLICES = 2**20, 2**8
_MAX_REASON = 200  # the most characters of an error's text that a client gets
_STRANGER = "\n"  # the name for all callers that are not trusted; no certificate can have this name
# The most calls at a time, and the most refused calls that are waiting for their end.
MAX_CALLS = 2**11
# The most rows of one fused call. On a CPU the limit is low, because a CPU computes one slice after
# another and gains little from fusing.
_MAX_BATCH_ROWS, _MAX_BATCH_ROWS_ON_CPU = 2**16, 2**10


_CODES: list[tuple[type[Exception], grpc.StatusCode]] = [
    (CacheLost, grpc.StatusCode.NOT_FOUND),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (FullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (LeavingError, grpc.StatusCode.UNAVAILABLE),
    (StaleSessionError, grpc.StatusCode.FAILED_PRECONDITION),
    (UntrustedError, grpc.StatusCode.UNAUTHENTICATED),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ComputationError, grpc.StatusCode.INTERNAL),
    (TransportError, grpc.StatusCode.DATA_LOSS),
]


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC status and the text for an error. The text never contains data of a
    payload.
    """
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error)[:_MAX_REASON] or "it took too long"
    # Any other error, such as a lack of memory. Its text could contain data of a payload.
    return grpc.StatusCode.INTERNAL, f"it could not be handled: {type(error).__name__}"


class Service:
    """Answers the calls of all versions of the service."""

    def __init__(
        self,
        device: torch.device,
        limits: Limits,
        deadlines: ServerDeadlines,
        callers: Callers,
        direct: OneSided | None,
    ) -> None:
        """`direct` is the server's NIXL agent, if the server uses NIXL."""
        self.device, self.callers, self.direct = device, callers, direct
        self.draining = False  # whether the server is about to leave, and accepts no more requests
        self.totals, self.audit, self.library = Totals(), Audit(), library_version()
        rows = _MAX_BATCH_ROWS_ON_CPU if device.type == "cpu" else _MAX_BATCH_ROWS
        self.worker = Worker(device, rows)
        self.sessions = Sessions(limits)
        self.account = Account(limits.queued_bytes)
        self._calls, self._refused = Account(MAX_CALLS), Account(MAX_CALLS)
        self.caches = Caches(limits.cache_bytes, device, DEFAULT)
        self._limits, self._deadlines = limits, deadlines
        self._started = time.monotonic()
        self._turns = Turns(_CHUNKS_AT_ONCE)
        # A call whose first request does not arrive keeps its turn for seconds. `Session` therefore
        # has separate turns: if it waited for a turn of `Compute`, its client could give up.
        self._first_turns = Turns(_FIRST_REQUESTS_AT_ONCE)
        self._control_turns = Turns(_CONTROL_REQUESTS_AT_ONCE)
        self._pauses = Turns(1)
        self._open_calls: Counter[str] = Counter()  # the number of open calls, by name
        self._kept = KeptSlices()
        self._readers = ThreadPoolExecutor(_READERS, "seqpar-read")
        self._news = asyncio.Event()  # set for a moment, to wake every session

    def status(self) -> Status:
        return Status(
            library=self.library,
            device=str(self.device),
            transports=["grpc"] if self.direct is None else ["nixl", "grpc"],
            seconds=time.monotonic() - self._started,
            clients=len(self.sessions),
            waiting=self.worker.waiting,
            **asdict(self.totals),
            busy_seconds=self.worker.busy_seconds,
            batches=self.worker.batches,
            caches=len(self.caches),
            cache_bytes=self.caches.account.held,
            draining=self.draining,
        )

    def handlers(self, version: Version) -> grpc.GenericRpcHandler:
        """Return gRPC's handler of one version of the service."""
        calls = {
            "Session": self._session,
            "Compute": self._compute,
            "Free": self._free,
            "Status": self._status,
        }
        # Calls with a single request are handled as streams too. Otherwise gRPC would read the
        # request before it calls the handler, which checks the caller.
        of_streams = grpc.stream_stream_rpc_method_handler
        handlers = {name: of_streams(self._answering(calls[name], version)) for name in calls}
        return grpc.method_handlers_generic_handler(version.service, handlers)

    def _answering(
        self, call: Callable[..., Awaitable[None]], version: Version
    ) -> Callable[[object, Context], Awaitable[None]]:
        """Return a handler that identifies the caller, makes the call, and reports an error."""
        turns = self._first_turns if call == self._compute else self._control_turns

        async def handle(_: object, context: Context) -> None:
            name = _STRANGER
            try:
                caller = self.callers.identify(context)
                name = caller.name
                self._calls.take(name, 1)
                raw = await self._first_request(turns, name, context)
                await call(caller, version, raw, context)
                return
            except TooManyError:
                code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "calls: the server has too many"
            except grpc.aio.AbortError:
                raise
            except grpc.aio.InternalError:  # the client left while the server wrote to it
                return
            except Exception as error:
                code, reason = status_of(error)
                if isinstance(error, UntrustedError):
                    self.audit.write(logging.WARNING, "refused", name, context.peer(), reason)
                # A call that fails because its session has ended does not count as refused.
                self.totals.refused += not isinstance(error, StaleSessionError)
                if code == grpc.StatusCode.INTERNAL:
                    # Only the type is logged, because the text could contain data of a payload.
                    self.audit.write(logging.ERROR, "error", "", "", type(error).__name__)
            # A refused call ends after a pause, so that its client cannot call again at once.
            with suppress(TooManyError):
                self._refused.take(name, 1)
                await self._pause(name)
            await context.abort(code, reason)

        return handle

    async def admit(self, context: Context) -> None:
        """Count a call of gRPC's health service among the calls of the client, or refuse the
        call.
        """
        try:
            self._calls.take(self.callers.identify(context).name, 1)
        except UntrustedError as error:
            await context.abort(*status_of(error))
        except TooManyError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server has too many calls")

    async def _pause(self, name: str) -> None:
        """Delay a call that needs little work. The calls of clients with one name are delayed one
        after another.

        The delay keeps clients with many connections from occupying the event loop with such calls.
        """
        async with self._pauses.turn(name):
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _first_request(self, turns: Turns, name: str, context: Context) -> bytes:
        """Read the first request of a call. While the request arrives, its bytes are not counted in
        the account of the client.
        """
        async with turns.turn(name), asyncio.timeout(self._deadlines.handshake):
            raw: bytes = await context.read()
        if raw is grpc.aio.EOF:
            raise RequestError("request: the call has ended without one")
        return raw

    # --- Sessions ---

    async def _session(
        self, caller: Caller, version: Version, raw: bytes, context: Context
    ) -> None:
        await self._pause(caller.name)
        request = version.read(version.messages.SessionRequest, raw)
        peer = context.peer()
        if self.draining:
            raise LeavingError(LEAVING)
        try:
            session = self.sessions.begin(*caller)
        except FullError as error:
            self.audit.write(logging.WARNING, "refused", caller.name, peer, str(error))
            raise
        self.audit.write(logging.INFO, "session", caller.name, peer, request.client)
        reason = "it has left"
        try:
            event = version.messages.SessionEvent(welcome=self._welcome(version, request, session))
            while True:
                async with asyncio.timeout(self._deadlines.idle):
                    await context.write(event.SerializeToString())
                if event.HasField("state"):  # the state is known at once
                    await self.wait_for_beat()
                event = version.messages.SessionEvent(state=self._state(version, session))
        except asyncio.CancelledError:
            if self.callers.trusts(caller):
                raise
            reason = "its certificate is no longer trusted"
            raise UntrustedError(reason) from None
        except TimeoutError:
            reason = f"it has taken no event for {self._deadlines.idle:g} s"
            raise
        finally:
            self.sessions.end(session)
            if self.direct is not None:
                self.direct.close(session.client)
            self.caches.end(session.client)
            level = logging.INFO if reason == "it has left" else logging.WARNING
            self.audit.write(level, "ended", caller.name, peer, reason)
            with suppress(RuntimeError):  # the server has ended
                self._readers.submit(trim)

    def _welcome(self, version: Version, request: Any, session: Session) -> Any:
        welcome = version.messages.Welcome(
            session=session.client.session,
            library=self.library,
            device=hardware_of(self.device),
            tokens=self._limits.tokens,
            bytes=self._limits.bytes,
            requests=session.most,
        )
        if request.HasField("arena") and (direct := self.direct) is not None:
            arena = direct.open(session.client)
            with suppress(TransportError):  # payloads are then sent in gRPC messages
                if arena is not None:
                    theirs = request.arena
                    target = ArenaTarget(theirs.agent, theirs.address, theirs.size)
                    direct.connect(session.client, target)
                    welcome.arena.MergeFrom(version.messages.Arena(**arena._asdict()))
        return welcome

    def _state(self, version: Version, session: Session) -> Any:
        return version.messages.ServerState(
            waiting=self.worker.waiting,
            cache_room=self.caches.account.room_of(session.client.name),
            draining=self.draining,
        )

    async def wait_for_beat(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await self._news.wait()

    def tell(self) -> None:
        """Send the server's state to the client of each session now."""
        self._news.set()
        self._news.clear()

    def end_untrusted(self) -> None:
        """End the sessions of certificates that are no longer trusted, and all calls of these
        sessions.
        """
        for session in self.sessions:
            if not self.callers.trusts(Caller(session.client.name, session.certificate)):
                # The session can be waiting to write an event that the client does not read.
                session.task.cancel()

    def close(self) -> None:
        """End all threads, and the NIXL agent. All calls must have ended."""
        self.worker.stop(self._deadlines.drain)
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self.direct is not None:
            self.direct.shutdown()

    # --- Tasks and steps ---

    async def _compute(
        self, caller: Caller, version: Version, raw: bytes, context: Context
    ) -> None:
        """Answer one task after another, until the client ends the call."""
        # Empty while a task is answered, so that the data of the request can be freed.
        requests = [version.read_request(raw)]
        del raw
        session = self.sessions.find(requests[0][0].session, caller.name)
        with self.sessions.call(session), self._opened(caller.name) as is_open:
            while True:
                await self._answer(version, session, *requests.pop(), is_open, context)
                if not is_open or (more := await context.read()) is grpc.aio.EOF:
                    return
                # The session was checked, but this connection can have a different certificate.
                if not self.callers.trusts(caller):
                    raise UntrustedError("the client's certificate is no longer trusted here")
                requests.append(version.read_request(more))
                del more
                if requests[0][0].session != session.client.session:
                    raise RequestError("session: all requests of a call must be of one session")

    @contextmanager
    def _opened(self, name: str) -> Iterator[bool]:
        """Yield whether a call may stay open for further tasks, and count the open calls.

        Only a few calls may stay open, because each of them can receive one request for which no
        memory is reserved yet.
        """
        of_name, of_all = self._open_calls[name], self._open_calls.total()
        is_open = of_name < _OPEN_CALLS and of_all < _ALL_OPEN_CALLS
        self._open_calls[name] += is_open
        try:
            yield is_open
        finally:
            self._open_calls[name] -= is_open
            if not self._open_calls[name]:
                del self._open_calls[name]

    async def _answer(
        self,
        version: Version,
        session: Session,
        header: RequestHeader,
        data: Buffer,
        is_open: bool,
        context: Context,
    ) -> None:
        if self.draining:
            raise LeavingError(LEAVING)
        # If the client reads nothing, gRPC keeps the call until the deadline that the client set.
        left = context.time_remaining()
        if left is None or left > 1.1 * MAX_CALL_SECONDS:  # gRPC rounds the deadline up
            raise RequestError(f"deadline: a call must have one of at most {MAX_CALL_SECONDS:g} s")
        form = form_of(header.task)
        form.check(self._limits)
        size = sum(form.request.sizes) + sum(form.result.sizes)
        self._check_memory(size)
        name = session.client.name
        with session.request():
            give = await self._take_room(name, size)
            if header.places is None:
                parts = await self._receive(name, header, data, context)
            else:
                parts = await self._take_written(session, header, header.places, context)
            del data
            job = await self._job(session, header, parts, size)
            del parts
            await self._computed(job)
            self.totals.tasks += 1
            self.totals.tokens += header.task.batch * header.task.q_rows
            self.totals.bytes += size
            await self._reply(version, job, header, is_open, context)
        give()

    def _check_memory(self, needed: int) -> None:
        """Raise a RequestError if one request needs more bytes than the limit for all requests."""
        if needed > (most := self.account.most):
            reason = f"this request needs {needed} bytes, and all requests together may have {most}"
            raise RequestError(f"memory: {reason}")

    async def _take_room(self, name: str, size: int) -> Callable[[], None]:
        """Wait until enough memory is free for a request, and reserve the memory.

        Returns a function that frees the memory. Raises a FullError after the deadline `request`.
        """
        try:
            async with asyncio.timeout(self._deadlines.request):
                return await self.account.wait_and_take(name, size)
        except TimeoutError:
            raise FullError("memory: other requests still use it") from None

    def _until(self, size: int) -> asyncio.Timeout:
        return asyncio.timeout(self._deadlines.transfer + size / LEAST_RATE)

    async def _receive(
        self, name: str, header: RequestHeader, data: Buffer, context: Context
    ) -> list[Bytes]:
        payload = form_of(header.task).request
        incoming = Incoming(payload)
        incoming.take(data)
        async with self._until(incoming.missing):
            while incoming.missing:
                raw = await self._next_chunk(name, context)
                if raw is grpc.aio.EOF:
                    raise RequestError(f"payload: its last {incoming.missing} bytes are missing")
                incoming.take(data_of(raw))
        return incoming.parts

    async def _next_chunk(self, name: str, context: Context) -> bytes:
        """Read the next message of a call. `name` is the name in the certificate of the client.
        Only a few calls with the same name read at the same time, and all other calls with this
        name wait.
        """
        async with self._turns.turn(name):
            chunk = asyncio.ensure_future(context.read())
            try:
                await asyncio.wait([chunk], timeout=_PATIENCE_SECONDS)
            except BaseException:
                chunk.cancel()
                raise
        raw: bytes = await chunk
        return raw

    async def _take_written(
        self, session: Session, header: RequestHeader, places: Places, context: Context
    ) -> list[Bytes]:
        """Return a payload that the client writes with NIXL, before it sends an empty request."""
        if (direct := self.direct) is None:
            raise RequestError("places: this server does not use NIXL")
        sizes = form_of(header.task).request.sizes
        async with self._until(sum(sizes)):
            if await direct.polling(context.read()) != b"":
                raise RequestError("places: an empty request must follow a payload of NIXL")
        return direct.read(session.client, sizes, places.request)

    async def _job(
        self, session: Session, header: RequestHeader, parts: Sequence[Bytes], size: int
    ) -> ComputeJob:
        """Check a payload, and return the job that computes it."""
        task = header.task
        check = partial(self._check, header, parts, size)
        if size > _SMALL_PAYLOAD_BYTES or task.slices > _FEW_SLICES:
            request = await asyncio.get_running_loop().run_in_executor(self._readers, check)
        else:
            request = check()
        found: Request | CacheStep
        if request is None:
            assert header.step is not None
            found = self.caches.admit(session.client, task, header.step, parts)
            kind = found.kind
        else:
            found, kind = request, kind_of(request, self.device)
        done = asyncio.Event()
        on_done = partial(asyncio.get_running_loop().call_soon_threadsafe, done.set)
        return ComputeJob(session.client, task, found, size, kind, on_done, done)

    def _check(self, header: RequestHeader, parts: Sequence[Bytes], size: int) -> Request | None:
        """Check a payload. Returns the request if the payload belongs to a task, and None if it
        belongs to a decoding step.
        """
        task = header.task
        if header.step is not None:
            form_of(task).request.check(parts, header.checksum)
            return None
        request = unpack(task, header.checksum, parts, DEFAULT, self._kept)
        rows, keys = (x[:, 1] - x[:, 0] for x in (request.slices.q_rows, request.slices.k_rows))
        masked = (rows.clip(max=_MASK_ROWS) * keys)[~request.slices.full]
        self._check_memory(size + _MASK_BYTES * int(masked.max(initial=0)))
        return request

    async def _computed(self, job: ComputeJob) -> None:
        """Wait until a job is computed. If the client ends the call before the job begins, the job
        is removed from the queue.
        """
        worker = self.worker
        worker.add(job)
        try:
            async with asyncio.timeout(self._deadlines.request):
                await job.done.wait()
        except (TimeoutError, asyncio.CancelledError) as error:
            if worker.withdraw(job):
                if isinstance(error, TimeoutError):
                    raise FullError("the request waited for too long") from None
                raise
            cancelled = isinstance(error, asyncio.CancelledError)
            # A job that has begun uses its memory until it is done. In the meantime, this coroutine
            # can be cancelled twice: when the call ends, and when the session ends.
            while not job.done.is_set():
                try:
                    await job.done.wait()
                except asyncio.CancelledError:
                    cancelled = True
            if cancelled:
                raise asyncio.CancelledError from None
        if job.error is not None:
            raise job.error

    async def _reply(
        self,
        version: Version,
        job: ComputeJob,
        request: RequestHeader,
        is_open: bool,
        context: Context,
    ) -> None:
        """Send a result in chunks, as fast as the client reads them, or write it with NIXL."""
        assert job.result is not None
        # If a result were too short, the client would wait for the rest until its deadline.
        form_of(job.task).result.check_sizes(job.result)
        checksum = job.checksum ^ version.checksum(request)
        header, places = ReplyHeader(checksum, job.seconds, is_open), request.places
        pieces = chunks(job.result)
        async with self._until(job.size):
            if places is not None and (direct := self.direct) is not None:
                await direct.write(job.client, job.result, places.result)
                pieces = iter(())
            await context.write(version.reply(header, next(pieces, ())))
            for chunk in pieces:
                await context.write(joined(b"", chunk))

    # --- Other calls ---

    async def _free(self, caller: Caller, version: Version, raw: bytes, context: Context) -> None:
        await self._pause(caller.name)
        request = version.read(version.messages.FreeRequest, raw)
        session = self.sessions.find(request.session, caller.name)
        self.caches.free(session.client, request.cache)
        await context.write(version.messages.FreeReply().SerializeToString())

    async def _status(self, caller: Caller, version: Version, raw: bytes, context: Context) -> None:
        await self._pause(caller.name)
        reply = version.messages.StatusReply(**asdict(self.status()))
        await context.write(reply.SerializeToString())
