"""The servers that a pool knows, and which of them gets a task or a cache."""

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


class KnownServers:
    """The connections of a pool by address.

    Threads other than the event loop's may call only `__iter__`, `wait_for_any` and `place`.
    """

    def __init__(self, endpoint: PoolEndpoint, depth: int) -> None:
        """A server gets at most `depth` tasks at a time."""
        self.endpoint = endpoint
        self._depth = depth
        self._connections: dict[str, ServerConnection] = {}
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[ServerConnection]:
        return iter(list(self._connections.values()))

    def get(self, address: str) -> ServerConnection | None:
        return self._connections.get(address)

    def use(self, addresses: Sequence[str], events: ConnectionEvents) -> list[ServerConnection]:
        """Connect to these servers; return the connections to all others, no longer listed."""
        dropped = [self._connections.pop(x) for x in set(self._connections) - set(addresses)]
        for address in addresses:
            if address not in self._connections:
                self._connections[address] = ServerConnection(address, self.endpoint, events)
        return dropped

    def notify_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for_any(self, timeout: float) -> None:
        """Wait until one server is ready or all have refused this client."""

        def settled() -> bool:
            states = {connection.state for connection in self}
            return "ready" in states or states == {"refused"}

        with self._changed:
            self._changed.wait_for(settled, timeout)

    def allowance(self, work: PendingWork) -> float:
        """Return by how many seconds payloads on the network extend the deadlines of a task.

        A task that no server has yet waits for the payloads of other tasks.
        """
        connections = [attempt.connection for attempt in work.attempts] or list(self)
        return max([work.passing, *(connection.allowance for connection in connections)])

    def any_free(self, now: float) -> bool:
        return any(connection.is_free(self._depth, now) for connection in self)

    def any_able(self, work: PendingWork) -> bool:
        """Return whether a ready server accepts tasks of this size and has not failed this one."""
        ready = [connection for connection in self if connection.state == "ready"]
        able = [connection for connection in ready if connection.accepts(work)]
        if ready and not able:
            work.reason = "it is above the caps of all servers (--max-tokens, --max-bytes)"
        return any(connection.address not in work.avoid for connection in able)

    def choose(self, work: PendingWork, now: float, but: str = "") -> ServerConnection | None:
        """Return the free server that should finish a task first, or None; never server `but`."""
        free = [x for x in self if x.address != but and x.is_free(self._depth, now)]
        free = [x for x in free if x.accepts(work)]
        free = [x for x in free if x.address not in work.avoid] or free
        # A new server counts as fast as the fastest, and the longest idle one wins a tie. So a new
        # server gets a first task even if one other server could do them all.
        fastest = max((x.rate or 0.0 for x in free), default=0.0) or 1.0

        def order(server: ServerConnection) -> tuple[float, float]:
            seconds = (server.outstanding + work.cost) / (server.rate or fastest)
            return seconds, server.last_result

        return min(free, key=order, default=None)

    def place(self, nbytes: int, avoid: Collection[str]) -> CachePlace | None:
        """Reserve `nbytes` for a cache at the server with the most room; None if none has room."""
        able = [x for x in self if x.address not in avoid and x.cache_room > nbytes]
        able = [x for x in able if x.place is not None]
        chosen = max(able, key=lambda x: x.cache_room, default=None)
        if chosen is None:
            return None
        chosen.cache_room -= nbytes  # until the server reports its room again
        return chosen.place

    def at(self, place: CachePlace) -> ServerConnection | None:
        """Return the connection to a cache's server; None if it has another session now."""
        connection = self._connections.get(place.address)
        return connection if connection is not None and connection.place == place else None

    async def close(self) -> None:
        """Leave all servers."""
        await asyncio.gather(*(connection.close() for connection in self))
        if self.endpoint.direct is not None:
            self.endpoint.direct.shutdown()
