"""Groups that torchft's lighthouse forms, of processes on any number of hosts.

A process sends the lighthouse a request for a *quorum*, the list of members of the next group. The
lighthouse answers when every member of the last quorum has sent a request. If a member does not
send a request, the lighthouse waits for all live processes for a limited time. All processes that
have sent a request receive the same list.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Hashable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from seqpar.comm import launch
from seqpar.elastic.messages import Place, ProcessReport, newest

if TYPE_CHECKING:
    from torchft.coordination import LighthouseClient, Quorum, QuorumMember

VARIABLE = "TORCHFT_LIGHTHOUSE"  # torchft's variable with the address of the lighthouse
_CONNECT = timedelta(seconds=10)
_THIS_HOST = "localhost", "127.0.0.1"  # torchrun's names for the host of its agent's store
_FOREVER = timedelta(days=7)  # limit on waiting for other processes, which can be in a long step
_BEAT_SECONDS = 0.5  # time between heartbeats; a lighthouse waits 5 s for the next one
_SILENCE_SECONDS = 30.0  # a process gives up if the lighthouse does not answer for this time
_log = logging.getLogger("seqpar")


class LighthouseRendezvous:
    """A process's connection to torchft's lighthouse.

    Until the connection is closed, a thread sends heartbeats to the lighthouse.
    """

    def __init__(self, address: str) -> None:
        """Connect to the lighthouse. torchrun must have started this process."""
        where = launch.place()
        if where is None or where.serves:
            way_out = "start this process with torchrun --standalone"
            raise ValueError(f"{VARIABLE} needs a store that outlives this process: {way_out}")
        host = socket.gethostname()
        self._address = address
        self._store = f"{host if where.host in _THIS_HOST else where.host} {where.port}"
        # Members are ordered by name, so that the ranks of a host are neighbours.
        self._name = f"{host} {where.local:05} {uuid4()}"
        self._client = _client(address)
        self._members: list[str] = []  # the members of the current group
        self._generation = 0  # the generation of the current group
        self._next: Place | None = None  # the place that `regroups` found, until `place` returns it
        self._client.heartbeat(self._name)
        self._silent_since: float | None = None  # when the current failed heartbeats began
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def place(self, report: ProcessReport) -> Place:
        """Wait until the members of the next group have reported, and return this process's place
        in it.
        """
        place, self._next = self._next, None
        return place or self._place(*self._quorum(report))

    def regroups(self, report: ProcessReport) -> bool:
        """Return whether processes were lost, or wait to join the group. All members must call this
        after the same step.
        """
        members, time_ns = self._quorum(report)
        if self._is_unchanged(members) and not any(_data(x)["failed"] for x in members):
            return False
        self._next = self._place(members, time_ns)
        return True

    def store(self, place: Place) -> launch.Store:
        """Return the store that the members of a group share."""
        return launch.connect(place.host, place.port, _CONNECT)

    def close(self) -> None:
        """Stop the heartbeats. The lighthouse then regards this process as dead."""
        self._closed.set()
        self._beats.join()

    def _is_unchanged(self, members: list[QuorumMember]) -> bool:
        """Return whether the current group has exactly these members, and all of them know this
        group.

        A process that was silent does not know a group that was formed without it.
        """
        generations = {_data(member)["generation"] for member in members}
        return _names(members) == self._members and generations == {self._generation}

    def _place(self, members: list[QuorumMember], time_ns: int) -> Place:
        if all(_data(member)["done"] for member in members):
            return Place("done")
        if self._is_unchanged(members):
            return Place("unchanged")
        self._members = _names(members)
        # The lighthouse's number of the quorum is not used, because a restarted lighthouse counts
        # from 1 again.
        self._generation = time_ns
        source, lacking = newest([member.step for member in members])
        host, port = members[0].store_address.split()
        rank, ranks = self._members.index(self._name), len(members)
        return Place("", self._generation, rank, ranks, source, lacking, host, int(port))

    def _quorum(self, report: ProcessReport) -> tuple[list[QuorumMember], int]:
        """Request a quorum. Returns its members, sorted by name, and the lighthouse's time in
        ns.
        """
        answer: Future[Quorum] = Future()

        def ask() -> None:  # runs in a thread, because Python cannot interrupt a request
            data = report._asdict() | {"generation": self._generation}
            try:
                quorum = self._client.quorum(
                    self._name,
                    _FOREVER,
                    address=self._name,
                    store_address=self._store,
                    step=report.finished,
                    world_size=1,
                    shrink_only=False,
                    data=data,
                )
            except Exception as error:
                answer.set_exception(self._no_answer(error))
            else:
                answer.set_result(quorum)

        threading.Thread(target=ask, daemon=True).start()
        while True:
            try:
                quorum = answer.result(_SILENCE_SECONDS)
                members = sorted(quorum.participants, key=lambda member: member.replica_id)
                return members, quorum.created.seconds * 10**9 + quorum.created.nanos
            except TimeoutError:
                silent = self._silent_since
                if silent is not None and time.monotonic() - silent > _SILENCE_SECONDS:
                    raise self._no_answer(f"it was silent for {_SILENCE_SECONDS:g} s") from None
                _log.warning("waiting for the lighthouse %s to form a group", self._address)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_SECONDS):
            try:
                self._client.heartbeat(self._name)
                self._silent_since = None
            except (RuntimeError, TimeoutError) as error:
                self._silent_since = self._silent_since or time.monotonic()
                _log.warning("%s", self._no_answer(error))

    def _no_answer(self, reason: object) -> RuntimeError:
        return RuntimeError(f"the lighthouse {self._address} does not answer: {reason}")


def _client(address: str) -> LighthouseClient:
    try:
        from torchft.coordination import LighthouseClient
    except ImportError as error:
        text = f"{VARIABLE} needs torchft: pip install 'seqpar[elastic]'"
        raise ImportError(text) from error
    return LighthouseClient(address, _CONNECT)


def _names(members: list[QuorumMember]) -> list[str]:
    return [member.replica_id for member in members]


def _data(member: QuorumMember) -> dict[Hashable, Any]:
    if member.data is None or "generation" not in member.data:
        raise ValueError(
            f"{VARIABLE}: {member.replica_id!r} asked this lighthouse for a quorum, but runs a "
            "different program: start a separate lighthouse for this training"
        )
    return member.data
