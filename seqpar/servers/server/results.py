"""Sends results to the clients that asked for them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from seqpar.servers.server.clients import ClientConnection, Clients
from seqpar.servers.server.counters import Totals
from seqpar.servers.server.worker import ComputeJob
from seqpar.servers.transport.zeromq import WATCHING, Frames, Sending, pieces
from seqpar.servers.wire.limits import LEAST_RATE
from seqpar.servers.wire.payload import Buffer
from seqpar.servers.wire.protocol import Result, encode

_MAX_UNTRACKED_BYTES = 2**20  # a tracker costs more time than copying a small result


class ResultSender:
    """Sends results, and counts those that were sent."""

    def __init__(self, clients: Clients, totals: Totals, deadline: float) -> None:
        """A one-sided write may take `deadline` seconds and one more second per MiB."""
        self._clients, self._totals, self._deadline = clients, totals, deadline
        self._frames = Frames()
        self._sendings: list[tuple[ClientConnection, ComputeJob, Sending]] = []
        # Until then the server looks for direct requests without being woken. A client whose last
        # task was brief writes its next one without a knock.
        self._look_until = 0.0

    @property
    def needs_polling(self) -> bool:
        """Whether a one-sided write is in progress, or may arrive without waking the server."""
        return bool(self._sendings) or time.monotonic() < self._look_until

    def start(self, job: ComputeJob) -> None:
        """Begin to send a result, if the client still waits for it."""
        task, client = job.task, self._clients.get(job.client)
        if client is None or client.jobs.get(task.request) is not job:
            return
        if job.result is None:
            del client.jobs[task.request]
            self._clients.fail(client.peer, task, job.error or "the computation failed")
            return
        now, place = time.monotonic(), task.result_place
        watching = WATCHING if job.brief and place is not None else 0.0
        self._look_until = max(self._look_until, now + watching)
        message = Result(task.generation, task.request, job.checksum, job.seconds, watching)
        transport = self._frames if place is None else client.transport
        deadline = now + self._deadline + job.size / LEAST_RATE
        sending = Sending(client.peer, encode(message), deadline)
        transport.begin(sending, job.result, place)
        sending.frames = pieces(sending.frames)
        self._sendings.append((client, job, sending))

    def progress(self) -> None:
        """Send the messages of payloads that have arrived; fail those that have not."""
        moving = []
        for client, job, sending in self._sendings:
            if client.ended:
                continue
            client.transport.progress(sending)
            frames = sending.due(client.watched_until)
            if sending.moving:
                moving.append((client, job, sending))
                if frames:  # one, a Knock
                    self._clients.send(client.peer, bytes(frames[0]))
                continue
            del client.jobs[job.task.request]
            if sending.error is not None:
                self._clients.fail(client.peer, job.task, f"the result: {sending.error}")
                self._clients.give_up(client)
                continue
            if frames:
                self._send(client, job.size, frames)
            self._totals.tasks += 1
            self._totals.tokens += job.task.batch * job.task.q_rows
            self._totals.bytes += job.size
        self._sendings = moving

    def _send(self, client: ClientConnection, size: int, frames: Sequence[Buffer]) -> None:
        """Send a result. Its bytes count for its client until it has left the socket."""
        # Frames leave in order, so one tracker shows that all earlier small results have left too.
        client.untracked += size
        head, *payload = frames
        track = client.untracked >= _MAX_UNTRACKED_BYTES
        if trackers := self._clients.send(client.peer, bytes(head), *payload, track=track):
            client.leaving.append((client.untracked, trackers))
            client.untracked = 0
