"""A pool's report of where its attention was computed."""

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
    """One server of a pool, or this process, whose address and state are "home"."""

    address: str
    state: str  # "ready", "connecting", "draining", "refused" or "home"
    transport: str  # of its payloads, or ""
    device: str  # the part of its hardware that bits depend on, or "" if that is not known
    reason: str  # why it is not ready, or ""
    tasks: int  # the number of its results that were used
    share: float  # of all work, from 0 to 1
    lost: int  # how often the connection was lost


@dataclass(frozen=True)
class PoolReport:
    """The places where a pool's attention was computed since the pool was made."""

    servers: tuple[ServerReport, ...]  # the last one is this process
    retried: int  # attempts that failed or were given up, and were repeated elsewhere
    hedged: int  # tasks that were also sent to a second server
    wasted: int  # results that arrived second
    waiting: int  # tasks without a result

    @classmethod
    def of(cls, servers: Sequence[ServerConnection], home: LocalWorker, *counts: int) -> PoolReport:
        """Make a report; `counts` are its fields from `retried` on."""
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
