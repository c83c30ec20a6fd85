"""An attention server: one thread sends and receives, others compute.

The server keeps nothing of a task after its answer; the rows of caches stay (`caches.py`). A
message is checked before it has any effect. Each request gets one answer (a result, a refusal or a
busy reply) unless its client has left by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from hmac import compare_digest
from typing import Any, Literal

import torch
import zmq

from seqpar.core.arguments import to_device
from seqpar.servers.server.caches import CacheLost, Caches
from seqpar.servers.server.clients import ClientConnection, Clients
from seqpar.servers.server.compute import hardware_of, kind_of
from seqpar.servers.server.counters import Totals
from seqpar.servers.server.results import ResultSender
from seqpar.servers.server.worker import ComputeJob, Reader, Worker
from seqpar.servers.transport.addresses import is_own
from seqpar.servers.transport.choose import open_transports, own_name, transports_of
from seqpar.servers.transport.curve_keys import CurveKeys
from seqpar.servers.transport.peers import Peer
from seqpar.servers.transport.server_socket import ServerSocket
from seqpar.servers.transport.sockets import Wakeup
from seqpar.servers.transport.zeromq import TransportError
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import unpack
from seqpar.servers.wire.header import form_of
from seqpar.servers.wire.limits import MAX_CONTROL_BYTES, Limits, ServerDeadlines
from seqpar.servers.wire.payload import Buffer, Frame, RequestError
from seqpar.servers.wire.protocol import Message, decode, library_version, session_of
from seqpar.servers.wire.request import Request

AnyTask = protocol.Task | protocol.StepRequest
Credit = Literal["in credit", "beyond credit", "no request"]
_BEAT_SECONDS = 0.25  # between two signs of life
# Rows of one fused call. A CPU computes one slice after another: compared with one call per task, a
# fused call of tasks of 512 tokens takes a tenth longer, and of 128 tokens half as long again.
_MAX_BATCH_ROWS, _MAX_BATCH_ROWS_ON_CPU = 2**16, 2**10
_BUSY_SECONDS = 0.05  # after which a client may ask a full server again
_MAX_MESSAGES_PER_TURN = 64  # before results are sent
_MAX_TURN_SECONDS = 0.05
# Another thread reads larger payloads, and tables of more slices.
_SMALL_PAYLOAD_BYTES, _FEW_SLICES = 2**18, 2**8
_MASK_ROWS, _MASK_BYTES = 768, 12  # of the largest mask in memory; bytes per pair of rows


class Server:
    """Serves requests at an address until it is stopped."""

    def __init__(
        self,
        address: str,  # ipc://PATH, or tcp://HOST:PORT, where * is any free port
        *,
        device: torch.device | str = "cpu",
        limits: Limits | None = None,
        deadlines: ServerDeadlines | None = None,
        keys: CurveKeys | None = None,  # required unless the address is local
        # By default ZeroMQ, and on a Unix socket also NIXL if that is installed. NIXL trusts its
        # peers and does not encrypt.
        transports: Sequence[str] | None = None,
        backend: str = "default",  # of attention, by name as in `use_backend`
    ) -> None:
        self.device = to_device(torch.empty(0), device).device
        self.limits = limits or Limits()
        self.deadlines = deadlines or ServerDeadlines()
        self.totals = Totals()
        self.draining = False  # then it accepts no more requests
        self._backend = backend
        self._started = time.monotonic()
        if transports is None and not is_own(address):
            transports = ["zmq"]
        names = transports_of(transports)
        self._socket = ServerSocket(address, keys, self.limits, self.deadlines)
        self.address = self._socket.address
        self._transports = open_transports(names, own_name())
        self._frames = self._transports["zmq"]
        self._wakeup = Wakeup()
        rows = _MAX_BATCH_ROWS_ON_CPU if self.device.type == "cpu" else _MAX_BATCH_ROWS
        self._worker = Worker(self.device, rows, self._wakeup.set)
        self._reader = Reader(self._wakeup.set)
        self._clients = Clients(
            self._socket, self._transports, self.limits, self.deadlines, self.totals, self._on_end
        )
        self._caches = Caches(self.limits.cache_bytes, self.device, backend)
        self._results = ResultSender(self._clients, self.totals, self.deadlines.transfer)
        self._poller = zmq.Poller()
        self._poller.register(self._socket.socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        # A handler gets the client if the message has a generation, otherwise the peer.
        self._handlers: dict[type[Message], Callable[[Any, Any, list[Frame]], None]] = {
            protocol.Hello: self._hello,
            protocol.Ping: self._ping,
            protocol.Task: self._task,
            protocol.StepRequest: self._task,
            protocol.Free: self._free,
            protocol.Cancel: self._cancel,
            protocol.Knock: self._knock,
            protocol.Goodbye: self._goodbye,
            protocol.StatusRequest: self._send_status,
        }

    def stop(self) -> None:
        """Begin to drain: answer the accepted requests, accept no others, then let `run` return."""
        self.draining = True
        self._wakeup.set()

    def status(self) -> protocol.Status:
        """Return the server's numbers; any thread may ask."""
        return protocol.Status(
            library=library_version(),
            device=str(self.device),
            transports=list(self._transports),
            seconds=time.monotonic() - self._started,
            clients=len(self._clients),
            waiting=self._worker.waiting,
            **asdict(self.totals),
            busy_seconds=self._worker.busy_seconds,
            batches=self._worker.batches,
            caches=len(self._caches),
            cache_bytes=self._caches.nbytes,
            draining=self.draining,
        )

    # --- The loop ---

    def run(self, each_beat: Callable[[], None] | None = None) -> None:
        """Serve until stopped."""
        self._worker.start()
        self._reader.start()
        next_beat, leave_by = 0.0, None
        try:
            while True:
                for ready, _ in self._poller.poll(self._poll_milliseconds()):
                    if ready == self._wakeup.fd:
                        self._wakeup.clear()
                self._receive()
                self._take_read_payloads()
                self._worker.proceed()
                while self._worker.done:
                    self._results.start(self._worker.done.popleft())
                self._results.progress()
                self._clients.end_gone()
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + _BEAT_SECONDS
                    self._beat(now)
                    if each_beat is not None:
                        each_beat()
                if self.draining:
                    if leave_by is None:
                        leave_by = now + self.deadlines.drain
                        for client in self._clients:
                            self._clients.send(client.peer, protocol.Draining(client.generation))
                    if now > leave_by or not any(client.in_flight for client in self._clients):
                        return
        finally:
            self._close()

    def _beat(self, now: float) -> None:
        if not (self._worker.is_alive() and self._reader.is_alive()):
            raise RuntimeError("the compute thread has ended")
        self._clients.beat(now, self._worker.waiting, self._cache_room)
        late = now - self.deadlines.request
        self._withdraw(lambda job: job.arrived < late, "it waited for too long", late=True)

    def _close(self) -> None:
        self._worker.stop()
        self._reader.stop()
        for transport in self._transports.values():
            transport.shutdown()
        self._socket.close()
        self._worker.join(self.deadlines.drain)
        self._reader.join(self.deadlines.drain)
        self._wakeup.close()

    def _poll_milliseconds(self) -> int:
        """Return how long the thread may sleep until something arrives."""
        if self._results.needs_polling:
            return 0
        return min(100, *(transport.patience() for transport in self._transports.values()))

    def _receive(self) -> None:
        for transport in self._transports.values():
            for peer, message in transport.poll():
                self._handle(peer, [message], self._clients.get(peer))
        end = time.monotonic() + _MAX_TURN_SECONDS
        for _ in range(_MAX_MESSAGES_PER_TURN):
            if time.monotonic() > end or (received := self._socket.receive()) is None:
                return
            self._handle(*received)

    def _handle(
        self, peer: Peer, frames: list[Frame], written_to: ClientConnection | None = None
    ) -> None:
        """Handle a message, and count a payload that its sender had no credit for."""
        credit = self._answer(peer, frames, written_to)
        has_payload = len(frames) != 1 or len(frames[0]) > MAX_CONTROL_BYTES
        if credit == "in credit":
            self._clients.forgive_uncredited(peer)
        elif has_payload:
            self._clients.count_uncredited(peer, beyond=credit == "beyond credit")

    def _answer(
        self, peer: Peer, frames: list[Frame], written_to: ClientConnection | None
    ) -> Credit:
        """Handle a message; return whether it was a request, and if so, within the sender's credit.

        A message that was written to an earlier lease's memory is dropped.
        """
        try:
            if not frames:
                raise protocol.ProtocolError("message: there is none")
            message = decode(frames[0])
            handler = self._handlers.get(type(message))
            if handler is None:
                raise protocol.ProtocolError("message: a server takes no such message")
        except protocol.VersionMismatch as error:
            self._clients.refuse(peer, str(error))
            return "no request"
        except protocol.ProtocolError as error:
            self._clients.send(peer, protocol.Malformed(str(error)))
            return "no request"
        generation, client = getattr(message, "generation", None), self._clients.get(peer)
        if written_to is not None and generation != written_to.generation:
            return "no request"
        secret = b"" if client is None else client.secret
        session = session_of(frames[0])
        if client is None and isinstance(message, protocol.Ping):
            if self._clients.by_pulse(peer, message.generation, session) is not None:
                self._pong(peer, message)
            else:
                self._clients.send(peer, protocol.Stale(message.generation))
        elif generation is None:
            handler(peer, message, frames[1:])
        elif not compare_digest(secret, session):
            self._clients.send(peer, protocol.Stale(generation))
        elif (client := self._clients.find(peer, generation)) is not None:
            in_credit = client.unanswered < client.credits
            handler(client, message, frames[1:])
            if isinstance(message, AnyTask):
                return "in credit" if in_credit else "beyond credit"
        return "no request"

    # --- Handlers of messages, by type ---

    def _hello(self, peer: Peer, hello: protocol.Hello, frames: list[Frame]) -> None:
        room, device = self._cache_room(peer.key), hardware_of(self.device)
        self._clients.greet(peer, hello, device, room, self.draining)

    def _ping(self, client: ClientConnection, ping: protocol.Ping, frames: list[Frame]) -> None:
        self._pong(client.peer, ping)

    def _task(self, client: ClientConnection, task: AnyTask, frames: list[Frame]) -> None:
        try:
            job = self._admit(client, task, frames)
        except Exception as error:
            self._refuse(client.peer, task, error)
        else:
            if job is None:
                self._postpone(client.peer, task)

    def _cancel(
        self, client: ClientConnection, cancel: protocol.Cancel, frames: list[Frame]
    ) -> None:
        if (job := client.jobs.get(cancel.request)) is not None:
            job.withdrawn = "it was cancelled"
            self._withdraw(lambda each: each is job, job.withdrawn)

    def _free(self, client: ClientConnection, free: protocol.Free, frames: list[Frame]) -> None:
        self._caches.free(client.peer, free.cache)

    def _knock(self, peer: Peer, knock: protocol.Knock, frames: list[Frame]) -> None:
        """Wake up: the next turn reads direct writes. Poll more often if one is in progress."""
        if knock.under_way:
            for transport in self._transports.values():
                transport.hurry()

    def _goodbye(
        self, client: ClientConnection, goodbye: protocol.Goodbye, frames: list[Frame]
    ) -> None:
        self._clients.end(client.peer)

    def _send_status(
        self, peer: Peer, request: protocol.StatusRequest, frames: list[Frame]
    ) -> None:
        self._clients.send(peer, self.status())

    def _pong(self, peer: Peer, ping: protocol.Ping) -> None:
        waiting, room = self._worker.waiting, self._cache_room(peer.key)
        self._clients.send(peer, protocol.Pong(ping.generation, waiting, room))

    def _cache_room(self, key: str) -> int:
        return self._caches.room_of(key, self._socket.shared)

    # --- From a request to a job ---

    def _admit(
        self, client: ClientConnection, task: AnyTask, frames: list[Frame]
    ) -> ComputeJob | None:
        """Accept a request, to be read and computed, or return None if the server is full."""
        if not client.use(task.request):
            raise RequestError("request: a number that has been used")
        if self.draining:
            raise RequestError("the server is about to leave")
        form = form_of(task)
        form.check(self.limits)
        if (task.place is None) != (task.result_place is None):
            raise RequestError("result_place: it goes with a place")
        size = form.request.room + form.result.room
        self._check_memory(size)
        client.settle()
        if client.in_flight >= client.credits:
            return None
        if not self._clients.fits(client.peer.key, size):
            return None
        transport = self._frames if task.place is None else client.transport
        buffers = list(transport.read(client.peer, frames, form.request.sizes, task.place))
        job = ComputeJob(client.peer, task, None, size, None)
        read = partial(self._read_payload, client, task, buffers, size)
        slices = task.slices if isinstance(task, protocol.Task) else 0
        if form.request.room > _SMALL_PAYLOAD_BYTES or slices > _FEW_SLICES or client.reading:
            client.reading += 1
            client.jobs[task.request] = job
            self._reader.add(job, read)
        else:
            self._enqueue(client, job, read())
        return job

    def _read_payload(
        self, client: ClientConnection, task: AnyTask, buffers: list[Buffer], size: int
    ) -> Request | Sequence[Buffer]:
        """Check a payload, perhaps in the reader's thread; return a request or a step's buffers."""
        payload = form_of(task).request
        # A peer that was given up may still write to the arena.
        parts = payload.whole(buffers) if task.place is None else payload.copies(buffers)
        if isinstance(task, protocol.StepRequest):
            payload.check(parts, task.checksum)
            return parts
        request = unpack(task, parts, self._backend, client.kept)
        rows, keys = (x[:, 1] - x[:, 0] for x in (request.slices.q_rows, request.slices.k_rows))
        largest = (rows.clip(max=_MASK_ROWS) * keys).max(initial=0)
        self._check_memory(size + _MASK_BYTES * int(largest))
        return request

    def _check_memory(self, needed: int) -> None:
        """Refuse a request that needs more bytes than all requests may have."""
        most = self.limits.queued_bytes
        if needed > most:
            raise RequestError(f"memory: all requests may have {most} bytes, this needs {needed}")

    def _enqueue(self, client: ClientConnection, job: ComputeJob, payload: object) -> None:
        """Queue a job whose payload was read."""
        task = job.task
        if isinstance(task, protocol.StepRequest):
            assert isinstance(payload, Sequence)
            shared = self._socket.shared
            step = self._caches.admit(client.peer, task, payload, shared, checked=True)
            job.request, job.kind = step, step.kind
        else:
            assert isinstance(payload, Request)
            job.request, job.kind = payload, kind_of(payload, self.device)
        job.count_cost()
        client.jobs[task.request] = job
        client.watched_until = job.arrived + task.watching
        self._worker.add(job)

    def _take_read_payloads(self) -> None:
        """Queue the jobs whose payloads the reader has read, or refuse them."""
        while self._reader.done:
            job, payload = self._reader.done.popleft()
            client = self._clients.get(job.client)
            if client is None or client.jobs.get(job.task.request) is not job:
                continue
            client.reading -= 1
            try:
                if job.withdrawn is not None:
                    raise RequestError(job.withdrawn)
                if isinstance(payload, Exception):
                    raise payload
                self._enqueue(client, job, payload)
            except Exception as error:
                del client.jobs[job.task.request]
                self._refuse(job.client, job.task, error)

    def _refuse(self, peer: Peer, task: AnyTask, error: BaseException) -> None:
        if isinstance(error, CacheLost):
            self._clients.send(peer, protocol.Lost(task.generation, task.request))
        elif isinstance(error, RequestError | TransportError):
            self._clients.fail(peer, task, str(error))
        else:  # out of memory, for example; its message might contain data
            self._clients.fail(peer, task, f"it could not be read: {type(error).__name__}")

    def _postpone(self, peer: Peer, task: AnyTask) -> None:
        """Answer that the server is too busy for a request."""
        self.totals.refused += 1
        self._clients.send(peer, protocol.Busy(task.generation, task.request, _BUSY_SECONDS))

    def _withdraw(
        self, wanted: Callable[[ComputeJob], bool], reason: str, late: bool = False
    ) -> None:
        """Refuse some of the waiting jobs; tasks that are only late can be sent again."""
        for job in self._worker.withdraw(wanted):
            client = self._clients.get(job.client)
            assert client is not None  # a lease that ends withdraws its jobs
            del client.jobs[job.task.request]
            if late and isinstance(job.task, protocol.Task):
                self._postpone(job.client, job.task)
            else:  # a cache cannot continue after a step that was not computed
                self._clients.fail(job.client, job.task, reason)

    def _on_end(self, client: ClientConnection) -> None:
        self._worker.withdraw(lambda job: job.client == client.peer)
        self._reader.drop(client.peer)
        self._caches.end(client.peer)
