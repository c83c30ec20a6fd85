"""An attention server: one thread that sends and receives, and one that computes.

It keeps nothing of a request once that is answered. What arrives is checked before anything is done
with it; each request gets one answer, a result, a refusal or a busy reply, unless its client has
left by then.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from seqpar.servers import protocol
from seqpar.servers.addresses import is_local
from seqpar.servers.bound import BoundSocket
from seqpar.servers.codec import unpack
from seqpar.servers.header import (
    RequestError,
    check_header,
    placed,
    request_parts,
    result_parts,
)
from seqpar.servers.keys import Keys
from seqpar.servers.leases import Lease, grant, library_version, refusal
from seqpar.servers.limits import Limits, ServerDeadlines
from seqpar.servers.one_sided import OneSided, available
from seqpar.servers.payload import checksum
from seqpar.servers.protocol import Message, TransportName, decode, encode
from seqpar.servers.stats import Stats
from seqpar.servers.transport import Frames, Sending, Transport, TransportError
from seqpar.servers.wakeup import Wakeup
from seqpar.servers.worker import Job, Worker

_BEAT = 0.25  # seconds between two signs of life
_BATCH_ROWS = 2**16  # of one fused call
_AT_ONCE = 64  # messages that are read before results are sent
_BLOCK = 2**28  # bytes of memory for one-sided writes, in and out each


class Server:
    """Serves requests at an address until it is stopped.

    Args:
        address: ipc://PATH, or tcp://HOST:PORT, in which * is a free port.
        device: on which it computes.
        limits: what it takes.
        deadlines: how long it waits.
        keys: its keys, and the clients that it trusts; needed if the address is not local.
        transports: the transports that it offers, by default ZeroMQ's frames, and NIXL where that
            is installed and the address is local. NIXL trusts its peers, and does not encrypt.
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
        transports: Sequence[TransportName] | None = None,
        backend: str = "default",
    ) -> None:
        self.device = torch.device(device)
        self.limits, self.deadlines = limits or Limits(), deadlines or ServerDeadlines()
        self.stats, self.draining = Stats(), False
        self._backend, self._started = backend, time.monotonic()
        self._bound = BoundSocket(address, keys, self.limits, self.deadlines)
        self.address = self._bound.address
        if transports is None:
            transports = ["nixl", "zmq"] if is_local(address) and available() else ["zmq"]
        self._frames = Frames()
        self._transports: dict[TransportName, Transport] = {"zmq": self._frames}
        if "nixl" in transports:
            name = f"seqpar-server-{os.getpid()}-{secrets.token_hex(4)}"
            self._transports["nixl"] = OneSided(name, _BLOCK, _BLOCK)
        self._wakeup = Wakeup()
        self._worker = Worker(self.device, _BATCH_ROWS, self._wakeup.set)
        self._leases: dict[bytes, Lease] = {}
        self._sendings: list[tuple[Lease, Job, Sending]] = []
        self._gone: set[bytes] = set()
        self._poller = zmq.Poller()
        self._poller.register(self._bound.socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._handlers: dict[type[Message], Callable[[bytes, Any, list[Any]], None]] = {
            protocol.Hello: self._hello,
            protocol.Ping: self._ping,
            protocol.Task: self._task,
            protocol.Cancel: self._cancel,
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
                self._send_results()
                self._transport_progress()
                while self._gone:
                    self._drop(self._gone.pop())
                now = time.monotonic()
                if now >= beat:
                    beat = now + _BEAT
                    self._beat(now)
                    if each_beat is not None:
                        each_beat()
                if self.draining:
                    if leave_by is None:
                        leave_by = now + self.deadlines.drain
                        for lease in list(self._leases.values()):
                            self._send(lease.peer, protocol.Draining(lease.generation))
                    if now > leave_by or not any(x.in_flight for x in self._leases.values()):
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
        stats = self.stats
        return protocol.Status(
            library=library_version(),
            device=str(self.device),
            transports=list(self._transports),
            seconds=time.monotonic() - self._started,
            clients=len(self._leases),
            waiting=self._worker.waiting,
            tasks=stats.tasks,
            tokens=stats.tokens,
            bytes=stats.bytes,
            refused=stats.refused,
            busy_seconds=self._worker.busy_seconds,
            batches=self._worker.batches,
            draining=self.draining,
        )

    def _patience(self) -> int:
        """Return for how many milliseconds nothing needs to be done unless something arrives."""
        if self._sendings:
            return 0
        return min(100, *(transport.patience() for transport in self._transports.values()))

    def _receive(self) -> None:
        for _ in range(_AT_ONCE):
            if (received := self._bound.receive()) is None:
                return
            peer, frames = received
            try:
                if not frames:
                    raise protocol.ProtocolError("message: there is none")
                message = decode(frames[0])
                handler = self._handlers.get(type(message))
                if handler is None:
                    raise protocol.ProtocolError("message: a server takes no such message")
            except protocol.VersionMismatch as error:
                self.stats.damaged += 1
                self._send(peer, protocol.Refused(str(error)))
            except protocol.ProtocolError as error:
                self.stats.damaged += 1
                self._send(peer, protocol.Malformed(str(error)))
            else:
                handler(peer, message, frames[1:])

    def _hello(self, peer: bytes, hello: protocol.Hello, frames: list[Any]) -> None:
        self._drop(peer)
        reason = refusal(hello, self._transports)
        if reason is None and self.draining:
            reason = "the server is about to leave"
        if reason is None and len(self._leases) >= self.limits.clients:
            reason = f"clients: the server has {self.limits.clients} already"
        if reason is not None:
            self._send(peer, protocol.Refused(reason[:200]))
            return
        lease, welcome = grant(
            peer, hello, self._transports, self.limits, self.deadlines, str(self.device)
        )
        self._leases[peer] = lease
        self._send(peer, welcome)

    def _lease(self, peer: bytes, generation: int) -> Lease | None:
        """Return the lease that a message is under, or say that there is none."""
        lease = self._leases.get(peer)
        if lease is None or lease.generation != generation:
            self._send(peer, protocol.Stale(generation))
            return None
        lease.seen = time.monotonic()
        return lease

    def _ping(self, peer: bytes, ping: protocol.Ping, frames: list[Any]) -> None:
        self._lease(peer, ping.generation)

    def _task(self, peer: bytes, task: protocol.Task, frames: list[Any]) -> None:
        lease = self._lease(peer, task.generation)
        if lease is None:
            return
        try:
            if task.request <= lease.last:
                raise RequestError("request: a number that has been used")
            lease.last = task.request
            if self.draining:
                raise RequestError("the server is about to leave")
            check_header(task, self.limits)
            parts = request_parts(task)
            size = placed(parts)[1] + placed(result_parts(task))[1]
            lease.settle()
            held = sum(each.held for each in self._leases.values())
            if lease.in_flight >= self.limits.requests or held + size > self.limits.queued_bytes:
                self.stats.refused += 1
                self._send(peer, protocol.Busy(task.generation, task.request, 0.05))
                return
            sizes = [part.nbytes for part in parts]
            if (task.place is None) != (task.result_place is None):
                raise RequestError("result_place: it goes with a place")
            transport = self._frames if task.place is None else lease.transport
            buffers = transport.read(peer, frames, sizes, task.place)
            job = Job(peer, task, unpack(task, buffers, self._backend), size)
        except (RequestError, TransportError, ValueError) as error:
            self._fail(peer, task, str(error))
            return
        lease.jobs[task.request] = job
        self._worker.add(job)

    def _fail(self, peer: bytes, task: protocol.Task, reason: str) -> None:
        self.stats.refused += 1
        self._send(peer, protocol.Failed(task.generation, task.request, reason[:200]))

    def _cancel(self, peer: bytes, cancel: protocol.Cancel, frames: list[Any]) -> None:
        lease = self._lease(peer, cancel.generation)
        if lease is not None and (job := lease.jobs.get(cancel.request)) is not None:
            for found in self._worker.withdraw(lambda each: each is job):
                self._fail(peer, found.task, "it was cancelled")
                del lease.jobs[cancel.request]

    def _goodbye(self, peer: bytes, goodbye: protocol.Goodbye, frames: list[Any]) -> None:
        if self._lease(peer, goodbye.generation) is not None:
            self._drop(peer)

    def _report(self, peer: bytes, request: protocol.StatusRequest, frames: list[Any]) -> None:
        self._send(peer, self.status())

    def _drop(self, peer: bytes) -> None:
        """End a lease, and free all that it holds."""
        lease = self._leases.pop(peer, None)
        if lease is not None:
            self._worker.withdraw(lambda job: job.client == peer)
            lease.transport.close(peer)
            self._sendings = [x for x in self._sendings if x[0] is not lease]

    def _send_results(self) -> None:
        """Begin to send what has been computed, if whoever asked for it is still there."""
        while self._worker.done:
            job = self._worker.done.popleft()
            task = job.task
            lease = self._leases.get(job.client)
            if lease is None or lease.jobs.get(task.request) is not job:
                continue
            if job.result is None:
                del lease.jobs[task.request]
                self._fail(lease.peer, task, job.error or "the computation failed")
                continue
            message = protocol.Result(
                task.generation, task.request, checksum(job.result), job.seconds
            )
            deadline = time.monotonic() + self.deadlines.transfer
            place = task.result_place
            transport = self._frames if place is None else lease.transport
            sending = transport.begin(lease.peer, encode(message), job.result, place, deadline)
            self._sendings.append((lease, job, sending))

    def _transport_progress(self) -> None:
        """Send the messages whose payloads have arrived, and tell of those that have not."""
        for transport in self._transports.values():
            transport.poll()
        remaining = []
        for lease, job, sending in self._sendings:
            lease.transport.progress(sending)
            if sending.moving:
                remaining.append((lease, job, sending))
                continue
            del lease.jobs[job.task.request]
            if sending.error is not None:
                self._fail(lease.peer, job.task, f"the result: {sending.error}")
                self._send(lease.peer, protocol.Stale(lease.generation))
                self._gone.add(lease.peer)
                continue
            trackers = self._send(lease.peer, sending.message, sending.frames)
            if trackers:
                lease.leaving.append((job.size, trackers))
            self.stats.tasks += 1
            self.stats.tokens += job.task.batch * job.task.q_rows
            self.stats.bytes += job.size
        self._sendings = remaining

    def _send(
        self, peer: bytes, message: Message | bytes, frames: Sequence[Any] = ()
    ) -> list[zmq.MessageTracker]:
        """Send a message without waiting; end the lease of a client that has left."""
        data = message if isinstance(message, bytes) else encode(message)
        trackers = self._bound.send(peer, [data, *frames])
        if trackers is None:
            self._gone.add(peer)
        return trackers or []

    def _beat(self, now: float) -> None:
        """Give signs of life, and end what waits for too long."""
        for peer, lease in list(self._leases.items()):
            if now - lease.seen > self.deadlines.idle:
                self._drop(peer)
                continue
            lease.settle()
            self._send(peer, protocol.Pong(lease.generation, self._worker.waiting))
        late = now - self.deadlines.request
        for job in self._worker.withdraw(lambda job: job.arrived < late):
            lease = self._leases[job.client]
            del lease.jobs[job.task.request]
            self._fail(lease.peer, job.task, "it waited for too long")
