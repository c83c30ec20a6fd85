"""The report of a pool: the state of each server, and the number of tasks that it computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqpar.servers.pool.connection import ServerConnection
    from seqpar.servers.pool.local_worker import LocalWorker

HOME = "home"


@dataclass(frozen=True)
class ServerReport:
    """One row of the report: a server or this process. The address and state of this process are
    "home".
    """

    address: str
    state: str  # "ready", "connecting", "draining", "refused" or "home"
    transport: str  # the transport of the server's payloads, or ""
    device: str  # the hardware on which the bits of results depend, or "" if it is not known
    reason: str  # why the server is not ready, or ""
    tasks: int  # the number of the server's results that were used
    share: float  # the fraction of all work that the server computed, from 0 to 1
    lost: int  # how often the connection was lost


@dataclass(frozen=True)
class PoolReport:
    """Which servers computed a pool's attention since the pool was made."""

    servers: tuple[ServerReport, ...]  # the last element is this process
    retried: int  # the number of times that a task was sent again, after a failed or late attempt
    hedged: int  # the number of tasks that were also sent to a second server
    wasted: int  # the number of results that were not used, because the task had a result already
    waiting: int  # the number of tasks that have no result yet

    @classmethod
    def of(cls, servers: Sequence[ServerConnection], home: LocalWorker, *counts: int) -> PoolReport:
        """Make a report. `counts` are the values of the fields from `retried` on."""
        total = max(1, sum(x.work for x in servers) + home.work)
        rows = []
        for x in servers:
            state = x.state, x.transport, x.device, x.reason
            rows.append(ServerReport(x.address, *state, x.tasks, x.work / total, x.lost))
        rows.append(ServerReport(HOME, HOME, "", home.device, "", home.tasks, home.work / total, 0))
        return cls(tuple(rows), *counts)

    def __str__(self) -> str:
        width = max(len(x.address) for x in self.servers)
        lines = []
        for x in self.servers:
            state = f"{x.state} by {x.transport}" if x.transport else x.state
            state += f": {x.reason}" if x.reason else ""
            lines.append(f"{x.address:<{width}}  {x.share:>6.1%}  {x.tasks:>8} tasks  {state}")
        devices = sorted({x.device for x in self.servers if x.tasks and x.device})
        if len(devices) > 1:
            lines.append(f"the last digits depend on who computed: {', '.join(devices)}")
        counts = f"{self.retried} retried, {self.hedged} hedged, {self.wasted} answered twice"
        return "\n".join([*lines, f"{counts}, {self.waiting} waiting"])
