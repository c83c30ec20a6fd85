"""An attention server: one thread that sends and receives, and one that computes.

It keeps nothing of a task once that is answered, and of the steps of a cache its rows (`caches`).
What arrives is checked before anything is done with it; each request gets one answer, a result, a
refusal or a busy reply, unless its client has left by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from seqpar.arguments import to_device
from seqpar.servers import protocol
from seqpar.servers.addresses import is_own
from seqpar.servers.answers import Answers
from seqpar.servers.bound import BoundSocket
from seqpar.servers.caches import CacheLost, Caches
from seqpar.servers.codec import unpack
from seqpar.servers.compute import kind_of
from seqpar.servers.ends import make_ends, own_name, transports_of
from seqpar.servers.hardware import hardware_of
from seqpar.servers.header import form_of
from seqpar.servers.keys import Keys
from seqpar.servers.leases import Lease, library_version
from seqpar.servers.limits import Limits, ServerDeadlines
from seqpar.servers.payload import RequestError
from seqpar.servers.protocol import Message, decode
from seqpar.servers.sessions import Sessions
from seqpar.servers.stats import Stats
from seqpar.servers.transport import TransportError
from seqpar.servers.wakeup import Wakeup
from seqpar.servers.worker import Job, Worker

_BEAT = 0.25  # seconds between two signs of life
# Rows of one fused call. A CPU computes one slice after another, so fused calls of more than small
# tasks only take longer.
_BATCH_ROWS, _BATCH_ROWS_ON_CPU = 2**16, 2**10
_BUSY = 0.05  # seconds after which a client may ask a full server again
_AT_ONCE = 64  # messages that are read before results are sent


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
        keys: Keys | None = None,
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
        self._worker = Worker(self.device, rows, self._wakeup.set)
        self._sessions = Sessions(
            self._bound, self._transports, self.limits, self.deadlines, self.stats, self._ended
        )
        self._caches = Caches(self.limits.cache_bytes, self.device, backend)
        self._answers = Answers(self._sessions, self.stats, self.deadlines.transfer)
        self._poller = zmq.Poller()
        self._poller.register(self._bound.socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._handlers: dict[type[Message], Callable[[bytes, Any, list[Any]], None]] = {
            protocol.Hello: self._hello,
            protocol.Ping: self._ping,
            protocol.Task: self._task,
            protocol.Step: self._task,
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
        beat, leave_by = 0.0, None
        try:
            while True:
                for ready, _ in self._poller.poll(self._patience()):
                    if ready == self._wakeup.fd:
                        self._wakeup.clear()
                self._receive()
                self._worker.proceed()
                while self._worker.done:
                    self._answers.start(self._worker.done.popleft())
                self._answers.progress()
                self._sessions.end_gone()
                now = time.monotonic()
                if now >= beat:
                    beat = now + _BEAT
                    if not self._worker.is_alive():
                        raise RuntimeError("the compute thread has ended")
                    self._sessions.beat(now, self._worker.waiting, self._caches.room)
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
        for transport in self._transports.values():
            transport.shutdown()
        self._bound.close()
        self._worker.join(self.deadlines.drain)
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

    def _receive(self) -> None:
        for transport in self._transports.values():
            for peer, written in transport.poll():
                self._read(peer, [written], self._sessions.get(peer))
        for _ in range(_AT_ONCE):
            if (received := self._bound.receive()) is None:
                return
            self._read(*received)

    def _read(self, peer: bytes, frames: list[Any], written_to: Lease | None = None) -> None:
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
            other = isinstance(error, protocol.VersionMismatch)
            answer = protocol.Refused if other else protocol.Malformed
            self._sessions.send(peer, answer(str(error)))
        else:
            of = getattr(message, "generation", None)
            if written_to is None or of == written_to.generation:
                handler(peer, message, frames[1:])

    def _hello(self, peer: bytes, hello: protocol.Hello, frames: list[Any]) -> None:
        room, device = self._caches.room, hardware_of(self.device)
        self._sessions.greet(peer, hello, device, room, self.draining)

    def _ping(self, peer: bytes, ping: protocol.Ping, frames: list[Any]) -> None:
        self._sessions.find(peer, ping.generation)

    def _task(self, peer: bytes, task: protocol.Task | protocol.Step, frames: list[Any]) -> None:
        lease = self._sessions.find(peer, task.generation)
        if lease is None:
            return
        try:
            job = self._admit(lease, task, frames)
        except CacheLost:
            self._sessions.send(peer, protocol.Lost(task.generation, task.request))
        except (RequestError, TransportError) as error:
            self._sessions.fail(peer, task, str(error))
        except Exception as error:  # memory that there is not, say
            self._sessions.fail(peer, task, f"it could not be read: {type(error).__name__}")
        else:
            if job is None:
                self.stats.refused += 1
                busy = protocol.Busy(task.generation, task.request, _BUSY)
                self._sessions.send(peer, busy)
            else:
                lease.jobs[task.request] = job
                lease.watched_until = job.arrived + task.watching
                self._worker.add(job)

    def _admit(
        self, lease: Lease, task: protocol.Task | protocol.Step, frames: list[Any]
    ) -> Job | None:
        """Return the job that a request is, checked, or None if the server is full."""
        if not lease.use(task.request):
            raise RequestError("request: a number that has been used")
        if self.draining:
            raise RequestError("the server is about to leave")
        form = form_of(task)
        form.check(self.limits)
        if (task.place is None) != (task.result_place is None):
            raise RequestError("result_place: it goes with a place")
        size = form.request.room + form.result.room
        lease.settle()
        full = self._sessions.held + size > self.limits.queued_bytes
        if full or lease.in_flight >= self.limits.requests:
            return None
        transport = self._frames if task.place is None else lease.transport
        buffers = transport.read(lease.peer, frames, form.request.sizes, task.place)
        if isinstance(task, protocol.Step):
            step = self._caches.admit(lease.peer, task, buffers)
            return Job(lease.peer, task, step, size, step.kind)
        request = unpack(task, buffers, self._backend)
        return Job(lease.peer, task, request, size, kind_of(request, self.device))

    def _cancel(self, peer: bytes, cancel: protocol.Cancel, frames: list[Any]) -> None:
        lease = self._sessions.find(peer, cancel.generation)
        if lease is not None and (job := lease.jobs.get(cancel.request)) is not None:
            self._withdraw(lambda each: each is job, "it was cancelled")

    def _free(self, peer: bytes, free: protocol.Free, frames: list[Any]) -> None:
        if self._sessions.find(peer, free.generation) is not None:
            self._caches.free(peer, free.cache)

    def _knock(self, peer: bytes, knock: protocol.Knock, frames: list[Any]) -> None:
        """Read what was written in the next turn, and look for what is on its way more often."""
        if knock.under_way:
            for transport in self._transports.values():
                transport.hurry()

    def _goodbye(self, peer: bytes, goodbye: protocol.Goodbye, frames: list[Any]) -> None:
        if self._sessions.find(peer, goodbye.generation) is not None:
            self._sessions.end(peer)

    def _report(self, peer: bytes, request: protocol.StatusRequest, frames: list[Any]) -> None:
        self._sessions.send(peer, self.status())

    def _withdraw(self, wanted: Callable[[Job], bool], reason: str) -> None:
        """Compute some of the waiting jobs no more, and say why."""
        for job in self._worker.withdraw(wanted):
            lease = self._sessions.get(job.client)
            assert lease is not None  # what ends takes its jobs with it
            del lease.jobs[job.task.request]
            self._sessions.fail(job.client, job.task, reason)

    def _ended(self, lease: Lease) -> None:
        self._worker.withdraw(lambda job: job.client == lease.peer)
        self._caches.end(lease.peer)
