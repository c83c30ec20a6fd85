"""The connections of a pool to its servers, and the choice of a server for a task or a cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterator, Sequence

from seqpar.servers.pool.connection import (
    CachePlace,
    ConnectionEvents,
    PendingWork,
    PoolEndpoint,
    ServerConnection,
)

_SHOWN = 3  # the most servers whose states an error message lists


class KnownServers:
    """The connections of a pool, by the address of the server.

    Only `__iter__`, `wait_for_any` and `place` can be called in any thread. All other methods are
    called in the event loop's thread.
    """

    def __init__(self, endpoint: PoolEndpoint, depth: int) -> None:
        """`depth` is the largest number of tasks that one server has at a time."""
        self.endpoint = endpoint
        self._depth = depth
        self._connections: dict[str, ServerConnection] = {}
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[ServerConnection]:
        return iter(list(self._connections.values()))

    def get(self, address: str) -> ServerConnection | None:
        return self._connections.get(address)

    def use(self, addresses: Sequence[str], events: ConnectionEvents) -> list[ServerConnection]:
        """Connect to the servers at these addresses, and forget all other servers.

        Returns the connections to the forgotten servers.
        """
        dropped = [self._connections.pop(x) for x in set(self._connections) - set(addresses)]
        for address in addresses:
            if address not in self._connections:
                self._connections[address] = ServerConnection(address, self.endpoint, events)
        return dropped

    def notify_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for_any(self, timeout: float) -> None:
        """Wait at most `timeout` seconds, until a server is ready or all servers have refused this
        pool.
        """

        def settled() -> bool:
            states = {connection.state for connection in self}
            return "ready" in states or states == {"refused"}

        with self._changed:
            self._changed.wait_for(settled, timeout)

    def allowance(self, work: PendingWork) -> float:
        """Return the seconds by which the deadlines of a task are extended, for sending payloads.

        If the task was not sent yet, the result is the longest extension of all servers.
        """
        connections = [attempt.connection for attempt in work.attempts] or list(self)
        return max([work.passing, *(connection.allowance for connection in connections)])

    def any_free(self, now: float) -> bool:
        return any(connection.is_free(self._depth, now) for connection in self)

    def any_able(self, work: PendingWork) -> bool:
        ready = [connection for connection in self if connection.state == "ready"]
        able = [connection for connection in ready if connection.accepts(work)]
        if ready and not able:
            work.reason = "it is above the limits of all servers (--max-tokens, --max-bytes)"
        return any(connection.address not in work.avoid for connection in able)

    def why_none_is_ready(self) -> str:
        states = [f"{x.address} is {x.state}: {x.reason}" for x in self if x.reason]
        more = [f"{len(states) - _SHOWN} more"] if len(states) > _SHOWN else []
        found = "; ".join([*states[:_SHOWN], *more])
        return f"no server was ready ({found})" if found else "no server was ready"

    def choose(self, work: PendingWork, now: float, but: str = "") -> ServerConnection | None:
        """Return the server that is expected to finish a task first, among the servers that can
        take a task now. Return None if there is no such server.

        The server at the address `but` is not chosen.
        """
        free = [x for x in self if x.address != but and x.is_free(self._depth, now)]
        free = [x for x in free if x.accepts(work)]
        free = [x for x in free if x.address not in work.avoid] or free
        # A server that has no result yet is assumed to be as fast as the fastest free server. If
        # several servers should finish at the same time, the one whose last result is the oldest
        # gets the task. A new server therefore gets a task even if another server could compute all
        # tasks.
        fastest = max((x.rate or 0.0 for x in free), default=0.0) or 1.0

        def order(server: ServerConnection) -> tuple[float, float]:
            seconds = (server.outstanding + work.cost) / (server.rate or fastest)
            return seconds, server.last_result

        return min(free, key=order, default=None)

    def place(self, nbytes: int, avoid: Collection[str]) -> CachePlace | None:
        """Reserve `nbytes` for a cache on the server with the most free memory for caches.

        Servers whose address is in `avoid` are not used. Returns None if no server has enough
        memory.
        """
        able = [x for x in self if x.address not in avoid and x.cache_room > nbytes]
        able = [x for x in able if x.place is not None]
        chosen = max(able, key=lambda x: x.cache_room, default=None)
        if chosen is None:
            return None
        # An estimate, until the server's next event has the free memory.
        chosen.cache_room -= nbytes
        return chosen.place

    def at(self, place: CachePlace) -> ServerConnection | None:
        connection = self._connections.get(place.address)
        return connection if connection is not None and connection.place == place else None

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self))
        if self.endpoint.direct is not None:
            self.endpoint.direct.shutdown()
