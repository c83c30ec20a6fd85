"""An attention server: one thread that sends and receives, and one that computes.

It keeps nothing of a task once that is answered, and of the steps of a cache its rows (`caches`).
What arrives is checked before anything is done with it; each request gets one answer, a result, a
refusal or a busy reply, unless its client has left by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from hmac import compare_digest
from typing import Any

import torch
import zmq

from seqpar.core.arguments import to_device
from seqpar.servers.server.answers import Answers, seal
from seqpar.servers.server.caches import CacheLost, Caches
from seqpar.servers.server.compute import kind_of
from seqpar.servers.server.hardware import hardware_of
from seqpar.servers.server.leases import Lease, library_version
from seqpar.servers.server.sessions import Sessions
from seqpar.servers.server.stats import Stats
from seqpar.servers.server.worker import ComputeJob, Reader, Worker
from seqpar.servers.transport.addresses import is_own
from seqpar.servers.transport.choose import make_ends, own_name, transports_of
from seqpar.servers.transport.curve_keys import CurveKeys
from seqpar.servers.transport.peers import Peer
from seqpar.servers.transport.server_socket import BoundSocket
from seqpar.servers.transport.wakeup import Wakeup
from seqpar.servers.transport.zeromq import TransportError
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import unpack
from seqpar.servers.wire.header import form_of
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.payload import RequestError
from seqpar.servers.wire.protocol import Message, decode, session_of

_BEAT = 0.25  # seconds between two signs of life
# Rows of one fused call. A CPU computes one slice after another: compared with one call per task, a
# fused call of tasks of 512 tokens takes a tenth longer, and of 128 tokens half as long again.
_BATCH_ROWS, _BATCH_ROWS_ON_CPU = 2**16, 2**10
_BUSY = 0.05  # seconds after which a client may ask a full server again
_AT_ONCE = 64  # messages that are read before results are sent
_TURN = 0.05  # seconds after which no more messages are read before that
# A payload of more bytes, or with a table of more slices, is not read by the thread that answers.
_SMALL_PAYLOAD, _FEW_SLICES = 2**18, 2**8
_MASK_ROWS, _MASK_BYTES = 768, 12  # of the largest mask that is made at a time, bytes of a pair


class Server:
    """Serves requests at an address until it is stopped.

    Args:
        address: ipc://PATH, or tcp://HOST:PORT, in which * is a free port.
        device: on which it computes.
        limits: what it takes.
        deadlines: how long it waits.
        keys: its keys, and the clients that it trusts; needed if the address is not local.
        transports: the transports that it offers, by default ZeroMQ's frames, and NIXL where that
            is installed and the address a Unix socket. NIXL trusts its peers, and does not encrypt.
        backend: of attention; by default as everywhere.

    Attributes:
        address: at which it is bound.
        stats: what it has counted.
    """

    def __init__(
        self,
        address: str,
        *,
        device: torch.device | str = "cpu",
        limits: Limits | None = None,
        deadlines: ServerDeadlines | None = None,
        keys: CurveKeys | None = None,
        transports: Sequence[str] | None = None,
        backend: str = "default",
    ) -> None:
        self.device = to_device(torch.empty(0), device).device
        self.limits, self.deadlines = limits or Limits(), deadlines or ServerDeadlines()
        self.stats, self.draining = Stats(), False
        self._backend, self._started = backend, time.monotonic()
        if transports is None and not is_own(address):
            transports = ["zmq"]
        names = transports_of(transports)
        self._bound = BoundSocket(address, keys, self.limits, self.deadlines)
        self.address = self._bound.address
        self._transports = make_ends(names, own_name())
        self._frames = self._transports["zmq"]
        self._wakeup = Wakeup()
        rows = _BATCH_ROWS_ON_CPU if self.device.type == "cpu" else _BATCH_ROWS
        self._worker = Worker(self.device, rows, self._wakeup.set, seal)
        self._reader = Reader(self._wakeup.set)
        self._sessions = Sessions(
            self._bound, self._transports, self.limits, self.deadlines, self.stats, self._ended
        )
        self._caches = Caches(self.limits.cache_bytes, self.device, backend)
        self._answers = Answers(self._sessions, self.stats, self.deadlines.transfer)
        self._poller = zmq.Poller()
        self._poller.register(self._bound.socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._handlers: dict[type[Message], Callable[[Peer, Any, list[Any]], None]] = {
            protocol.Hello: self._hello,
            protocol.Ping: self._ping,
            protocol.Task: self._task,
            protocol.StepRequest: self._task,
            protocol.Free: self._free,
            protocol.Cancel: self._cancel,
            protocol.Knock: self._knock,
            protocol.Goodbye: self._goodbye,
            protocol.StatusRequest: self._report,
        }

    def stop(self) -> None:
        """Begin to drain: answer what is there, take nothing more, then let `run` return."""
        self.draining = True
        self._wakeup.set()

    def run(self, each_beat: Callable[[], None] | None = None) -> None:
        """Serve until stopped."""
        self._worker.start()
        self._reader.start()
        beat, leave_by = 0.0, None
        try:
            while True:
                for ready, _ in self._poller.poll(self._patience()):
                    if ready == self._wakeup.fd:
                        self._wakeup.clear()
                self._receive()
                self._take_read()
                self._worker.proceed()
                while self._worker.done:
                    self._answers.start(self._worker.done.popleft())
                self._answers.progress()
                self._sessions.end_gone()
                now = time.monotonic()
                if now >= beat:
                    beat = now + _BEAT
                    if not (self._worker.is_alive() and self._reader.is_alive()):
                        raise RuntimeError("the compute thread has ended")
                    self._sessions.beat(now, self._worker.waiting, self._room)
                    late = now - self.deadlines.request
                    self._withdraw(lambda job: job.arrived < late, "it waited for too long")  # noqa: B023
                    if each_beat is not None:
                        each_beat()
                if self.draining:
                    if leave_by is None:
                        leave_by = now + self.deadlines.drain
                        for lease in self._sessions:
                            self._sessions.send(lease.peer, protocol.Draining(lease.generation))
                    if now > leave_by or not any(lease.in_flight for lease in self._sessions):
                        return
        finally:
            self._close()

    def _close(self) -> None:
        self._worker.stop()
        self._reader.stop()
        for transport in self._transports.values():
            transport.shutdown()
        self._bound.close()
        self._worker.join(self.deadlines.drain)
        if self._reader.ident is not None:
            self._reader.join(self.deadlines.drain)
        self._wakeup.close()

    def status(self) -> protocol.Status:
        """Return how the server does; any thread may ask."""
        return protocol.Status(
            library=library_version(),
            device=str(self.device),
            transports=list(self._transports),
            seconds=time.monotonic() - self._started,
            clients=len(self._sessions),
            waiting=self._worker.waiting,
            **{name: getattr(self.stats, name) for name in ("tasks", "tokens", "bytes", "refused")},
            busy_seconds=self._worker.busy_seconds,
            batches=self._worker.batches,
            caches=len(self._caches),
            cache_bytes=self._caches.nbytes,
            draining=self.draining,
        )

    def _patience(self) -> int:
        """Return for how many milliseconds nothing needs to be done unless something arrives."""
        if self._answers.moving or time.monotonic() < self._answers.watch_until:
            return 0
        return min(100, *(transport.patience() for transport in self._transports.values()))

    def _room(self, key: str) -> int:
        return self._caches.room_of(key, self._bound.shared)

    def _receive(self) -> None:
        for transport in self._transports.values():
            for peer, written in transport.poll():
                self._read(peer, [written], self._sessions.get(peer))
        end = time.monotonic() + _TURN
        for _ in range(_AT_ONCE):
            if time.monotonic() > end or (received := self._bound.receive()) is None:
                return
            self._read(*received)

    def _read(self, peer: Peer, frames: list[Any], written_to: Lease | None = None) -> None:
        """Deal with a message; one that was written to an earlier lease is nobody's."""
        try:
            if not frames:
                raise protocol.ProtocolError("message: there is none")
            message = decode(frames[0])
            handler = self._handlers.get(type(message))
            if handler is None:
                raise protocol.ProtocolError("message: a server takes no such message")
        except protocol.ProtocolError as error:
            self.stats.damaged += 1
            if isinstance(error, protocol.VersionMismatch):
                self._sessions.refuse(peer, str(error))
            else:
                self._sessions.send(peer, protocol.Malformed(str(error)))
        else:
            generation, lease = getattr(message, "generation", None), self._sessions.get(peer)
            if written_to is not None and generation != written_to.generation:
                return
            secret = b"" if lease is None else lease.secret
            session = session_of(frames[0])
            if lease is None and isinstance(message, protocol.Ping):
                if self._sessions.by_pulse(peer, message.generation, session) is not None:
                    self._pong(peer, message)
                else:
                    self._sessions.send(peer, protocol.Stale(message.generation))
            elif generation is None or compare_digest(secret, session):
                handler(peer, message, frames[1:])
            else:
                self._sessions.send(peer, protocol.Stale(generation))

    def _hello(self, peer: Peer, hello: protocol.Hello, frames: list[Any]) -> None:
        room, device = self._room(peer.key), hardware_of(self.device)
        self._sessions.greet(peer, hello, device, room, self.draining)

    def _ping(self, peer: Peer, ping: protocol.Ping, frames: list[Any]) -> None:
        if self._sessions.find(peer, ping.generation) is not None:
            self._pong(peer, ping)

    def _pong(self, peer: Peer, ping: protocol.Ping) -> None:
        waiting, room = self._worker.waiting, self._room(peer.key)
        self._sessions.send(peer, protocol.Pong(ping.generation, waiting, room))

    def _task(
        self, peer: Peer, task: protocol.Task | protocol.StepRequest, frames: list[Any]
    ) -> None:
        lease = self._sessions.find(peer, task.generation)
        if lease is None:
            return
        try:
            job = self._admit(lease, task, frames)
        except Exception as error:
            self._refuse(peer, task, error)
        else:
            if job is None:
                self.stats.refused += 1
                busy = protocol.Busy(task.generation, task.request, _BUSY)
                self._sessions.send(peer, busy)

    def _refuse(
        self, peer: Peer, task: protocol.Task | protocol.StepRequest, error: BaseException
    ) -> None:
        """Tell a client why its request cannot be computed."""
        if isinstance(error, CacheLost):
            self._sessions.send(peer, protocol.Lost(task.generation, task.request))
        elif isinstance(error, RequestError | TransportError):
            self._sessions.fail(peer, task, str(error))
        else:  # memory that there is not, for example
            self._sessions.fail(peer, task, f"it could not be read: {type(error).__name__}")

    def _admit(
        self, lease: Lease, task: protocol.Task | protocol.StepRequest, frames: list[Any]
    ) -> ComputeJob | None:
        """Take a request, to be read and computed, or return None if the server is full."""
        if not lease.use(task.request):
            raise RequestError("request: a number that has been used")
        if self.draining:
            raise RequestError("the server is about to leave")
        form = form_of(task)
        form.check(self.limits)
        if (task.place is None) != (task.result_place is None):
            raise RequestError("result_place: it goes with a place")
        size = form.request.room + form.result.room
        self._check_memory(size)
        lease.settle()
        if not self._sessions.fits(lease.peer.key, size) or lease.in_flight >= self.limits.requests:
            return None
        transport = self._frames if task.place is None else lease.transport
        buffers = list(transport.read(lease.peer, frames, form.request.sizes, task.place))
        job = ComputeJob(lease.peer, task, None, size, None)
        read = partial(self._payload, lease, task, buffers, size)
        slices = task.slices if isinstance(task, protocol.Task) else 0
        if form.request.room > _SMALL_PAYLOAD or slices > _FEW_SLICES or lease.reading:
            lease.reading += 1
            lease.jobs[task.request] = job
            self._reader.add(job, read)
        else:
            self._enqueue(lease, job, read())
        return job

    def _payload(
        self,
        lease: Lease,
        task: protocol.Task | protocol.StepRequest,
        buffers: list[Any],
        size: int,
    ) -> Any:
        """Return a task's request, or the buffers of a step, after the checksum was compared.

        A large payload's is called in the thread that reads them.
        """
        payload = form_of(task).request
        parts = payload.whole(buffers)
        if isinstance(task, protocol.StepRequest):
            payload.check(parts, task.checksum)
            return parts
        request = unpack(task, parts, self._backend, lease.kept)
        rows, keys = (x[:, 1] - x[:, 0] for x in (request.slices.q_rows, request.slices.k_rows))
        largest = (rows.clip(max=_MASK_ROWS) * keys).max(initial=0)
        self._check_memory(size + _MASK_BYTES * int(largest))
        return request

    def _check_memory(self, needed: int) -> None:
        """Raise a RequestError if a request alone needs more bytes than all may have."""
        most = self.limits.queued_bytes
        if needed > most:
            raise RequestError(f"memory: all requests may have {most} bytes, this needs {needed}")

    def _enqueue(self, lease: Lease, job: ComputeJob, payload: Any) -> None:
        """Let a job whose payload was read wait for its turn."""
        task = job.task
        if isinstance(task, protocol.StepRequest):
            step = self._caches.admit(lease.peer, task, payload, self._bound.shared, checked=True)
            job.request, job.kind = step, step.kind
        else:
            job.request, job.kind = payload, kind_of(payload, self.device)
        job.count_cost()
        lease.jobs[task.request] = job
        lease.watched_until = job.arrived + task.watching
        self._worker.add(job)

    def _take_read(self) -> None:
        """Let jobs whose payloads were read wait for their turn, or say what is wrong with them."""
        while self._reader.done:
            job, payload = self._reader.done.popleft()
            lease = self._sessions.get(job.client)
            if lease is None or lease.jobs.get(job.task.request) is not job:
                continue
            lease.reading -= 1
            error = payload if isinstance(payload, Exception) else None
            if job.withdrawn is not None:
                error = RequestError(job.withdrawn)
            if error is None:
                try:
                    self._enqueue(lease, job, payload)
                except Exception as raised:
                    error = raised
            if error is not None:
                del lease.jobs[job.task.request]
                self._refuse(job.client, job.task, error)

    def _cancel(self, peer: Peer, cancel: protocol.Cancel, frames: list[Any]) -> None:
        lease = self._sessions.find(peer, cancel.generation)
        if lease is not None and (job := lease.jobs.get(cancel.request)) is not None:
            job.withdrawn = "it was cancelled"
            self._withdraw(lambda each: each is job, job.withdrawn)

    def _free(self, peer: Peer, free: protocol.Free, frames: list[Any]) -> None:
        if self._sessions.find(peer, free.generation) is not None:
            self._caches.free(peer, free.cache)

    def _knock(self, peer: Peer, knock: protocol.Knock, frames: list[Any]) -> None:
        """Read what was written in the next turn, and look for what is on its way more often."""
        if knock.under_way:
            for transport in self._transports.values():
                transport.hurry()

    def _goodbye(self, peer: Peer, goodbye: protocol.Goodbye, frames: list[Any]) -> None:
        if self._sessions.find(peer, goodbye.generation) is not None:
            self._sessions.end(peer)

    def _report(self, peer: Peer, request: protocol.StatusRequest, frames: list[Any]) -> None:
        self._sessions.send(peer, self.status())

    def _withdraw(self, wanted: Callable[[ComputeJob], bool], reason: str) -> None:
        """Compute some of the waiting jobs no more, and say why."""
        for job in self._worker.withdraw(wanted):
            lease = self._sessions.get(job.client)
            assert lease is not None  # what ends takes its jobs with it
            del lease.jobs[job.task.request]
            self._sessions.fail(job.client, job.task, reason)

    def _ended(self, lease: Lease) -> None:
        self._worker.withdraw(lambda job: job.client == lease.peer)
        self._reader.drop(lease.peer)
        self._caches.end(lease.peer)
