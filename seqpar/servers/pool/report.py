"""What a pool says of where attention was computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqpar.servers.pool.link import ServerLink
    from seqpar.servers.pool.local_worker import Home

HOME = "home"


@dataclass(frozen=True)
class ServerReport:
    """What a pool has had of one server, or, where the address is "home", of its own process.

    Attributes:
        address: the server's.
        state: "ready", "connecting", "draining" or "refused"; "home" of the own process.
        transport: by which its payloads travel, or "".
        device: what it computes on, as far as bits depend on it, or "" if that is not known.
        reason: why it is not ready, or "".
        tasks: how many results of it were used.
        share: its part of all work whose results were used, from 0 to 1.
        lost: how often the connection was lost.
    """

    address: str
    state: str
    transport: str
    device: str
    reason: str
    tasks: int
    share: float
    lost: int


@dataclass(frozen=True)
class PoolReport:
    """Where a pool's attention was computed, since it was made.

    Attributes:
        servers: one entry a server, and the last for home.
        retried: attempts that failed, or were given up, and went elsewhere.
        hedged: tasks for which a second server was asked.
        wasted: results that came second.
        waiting: tasks without a result.
    """

    servers: tuple[ServerReport, ...]
    retried: int
    hedged: int
    wasted: int
    waiting: int

    @classmethod
    def of(
        cls,
        links: Sequence[ServerLink],
        home: Home,
        retried: int,
        hedged: int,
        wasted: int,
        waiting: int,
    ) -> PoolReport:
        """Make it from what links and home have counted."""
        total = max(1, sum(x.work for x in links) + home.work)
        rows = [
            ServerReport(
                x.address, x.state, x.transport, x.device, x.reason, x.tasks, x.work / total, x.lost
            )
            for x in links
        ]
        rows.append(ServerReport(HOME, HOME, "", home.device, "", home.tasks, home.work / total, 0))
        return cls(tuple(rows), retried, hedged, wasted, waiting)

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
