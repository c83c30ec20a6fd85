"""Results of a server on their way to the clients that asked for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from seqpar.servers.server.leases import Lease
from seqpar.servers.server.sessions import Sessions
from seqpar.servers.server.stats import Stats
from seqpar.servers.server.worker import ComputeJob
from seqpar.servers.transport.zeromq import WATCHING, Frames, Sending, pieces
from seqpar.servers.wire.limits import LEAST_RATE
from seqpar.servers.wire.payload import checksum
from seqpar.servers.wire.protocol import Result, encode

_MAX_UNTRACKED_BYTES = 2**20  # a tracker costs more time than copying a small result


def seal(job: ComputeJob) -> None:
    """Give a job that has a result its checksum, in the thread that computed it."""
    assert job.result is not None
    job.checksum = checksum(job.result)


class Answers:
    """Sends results, if whoever asked is still there, and says what became of them.

    Attributes:
        watch_until: when the server may cease to look for requests that are written to it, by a
            client whose last one was brief and which does not knock.
    """

    def __init__(self, sessions: Sessions, stats: Stats, deadline: float) -> None:
        """`deadline` is how many seconds a one-sided write may take, besides a second per MiB."""
        self._sessions, self._stats, self._deadline = sessions, stats, deadline
        self._frames = Frames()
        self._sendings: list[tuple[Lease, ComputeJob, Sending]] = []
        self.watch_until = 0.0

    @property
    def moving(self) -> bool:
        """Whether results are on their way by one-sided writes."""
        return bool(self._sendings)

    def start(self, job: ComputeJob) -> None:
        """Begin to send what has been computed."""
        task, lease = job.task, self._sessions.get(job.client)
        if lease is None or lease.jobs.get(task.request) is not job:
            return
        if job.result is None:
            del lease.jobs[task.request]
            self._sessions.fail(lease.peer, task, job.error or "the computation failed")
            return
        now, place = time.monotonic(), task.result_place
        watching = WATCHING if job.brief and place is not None else 0.0
        self.watch_until = max(self.watch_until, now + watching)
        numbers = task.generation, task.request, job.checksum
        message = Result(*numbers, job.seconds, watching)
        transport = self._frames if place is None else lease.transport
        deadline = now + self._deadline + job.size / LEAST_RATE
        sending = transport.begin(lease.peer, encode(message), job.result, place, deadline)
        sending.frames = pieces(sending.frames)
        self._sendings.append((lease, job, sending))

    def progress(self) -> None:
        """Send what follows payloads that have arrived, and tell of those that have not."""
        remaining = []
        for lease, job, sending in self._sendings:
            if lease.ended:
                continue
            lease.transport.progress(sending)
            if sending.moving:
                remaining.append((lease, job, sending))
                if meanwhile := sending.meanwhile():
                    self._sessions.send(lease.peer, *meanwhile)
                continue
            del lease.jobs[job.task.request]
            if sending.error is not None:
                self._sessions.fail(lease.peer, job.task, f"the result: {sending.error}")
                self._sessions.give_up(lease)
                continue
            if following := sending.following(lease.watched_until):
                self._send(lease, job.size, following)
            self._stats.tasks += 1
            self._stats.tokens += job.task.batch * job.task.q_rows
            self._stats.bytes += job.size
        self._sendings = remaining

    def _send(self, lease: Lease, size: int, frames: Sequence[Any]) -> None:
        """Send a result, which counts for its lease until it has left.

        Frames leave in their order, so one tracker tells that all earlier small results have left.
        """
        lease.untracked += size
        head, *payload = frames
        track = lease.untracked >= _MAX_UNTRACKED_BYTES
        if trackers := self._sessions.send(lease.peer, head, *payload, track=track):
            lease.leaving.append((lease.untracked, trackers))
            lease.untracked = 0
