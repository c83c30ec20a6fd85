"""The links of a pool: which servers there are, and which of them a task goes to."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import zmq

from seqpar.servers.pool.link import ServerLink
from seqpar.servers.pool.work import Attempt, CachePlace, PendingWork
from seqpar.servers.transport.addresses import is_own
from seqpar.servers.transport.curve_keys import CurveKeys
from seqpar.servers.transport.zeromq import Transport
from seqpar.servers.wire.protocol import TransportName

_MOST_SOCKETS = 2**12  # of ZeroMQ's, of which a server needs six


class Links:
    """Links by address, of which one thread makes all calls but a few.

    Any thread may call `__iter__`, `wait_for_any` and `place`.

    Attributes:
        context, poller: of their sockets.
        transports: how payloads travel.
    """

    def __init__(
        self,
        keys: CurveKeys | None,
        transports: dict[TransportName, Transport],
        client: tuple[str, str],
        connect_deadline: float,
        depth: int,
        writes_afar: bool,
    ) -> None:
        """Make none as yet.

        `client` is this one's version and name, `depth` how many tasks a server has at once;
        `writes_afar` says whether one-sided writes go elsewhere than
        through Unix sockets too.
        """
        self.context: zmq.Context[Any] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self.poller = zmq.Poller()
        self.transports = transports
        self._keys, self._client, self._deadline = keys, client, connect_deadline
        self._depth, self._writes_afar = depth, writes_afar
        self._links: dict[str, ServerLink] = {}
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[ServerLink]:
        return iter(list(self._links.values()))

    def use(self, addresses: Sequence[str]) -> list[ServerLink]:
        """Connect to these addresses; return the links to others, which are no longer used."""
        left = [self._links.pop(x) for x in set(self._links) - set(addresses)]
        for address in addresses:
            if address not in self._links:
                self._links[address] = self._connect(address)
        return left

    def _connect(self, address: str) -> ServerLink:
        transports = dict(self.transports)
        if not (self._writes_afar or is_own(address)):
            transports.pop("nixl", None)
        client, deadline = self._client, self._deadline
        return ServerLink(
            self.context, self.poller, address, self._keys, transports, client, deadline
        )

    def credit(self, attempt: Attempt) -> None:
        """Count a server's result as used."""
        if (link := self._links.get(attempt.address)) is not None:
            link.tasks += 1
            link.work += attempt.work.cost

    def waits(self, attempt: Attempt, now: float) -> float:
        """Return how long an attempt has waited since its server answered it or another one."""
        link = self._links.get(attempt.address)
        return now - max(attempt.started, 0.0 if link is None else link.last_result)

    def allowance(self, work: PendingWork) -> float:
        """Return by how many seconds deadlines of a task are longer, since payloads must pass.

        Where no server has it yet, payloads of other tasks pass first.
        """
        if work.attempts:
            seconds = [self._allowance_at(attempt) for attempt in work.attempts]
        else:
            seconds = [link.allowance for link in self]
        return max([work.passing, *seconds])

    def _allowance_at(self, attempt: Attempt) -> float:
        link = self._links.get(attempt.address)
        return 0.0 if link is None else link.allowance

    def distrust(self, address: str, reason: str) -> list[Attempt]:
        """Use a server no more; return what it owed an answer."""
        link = self._links.get(address)
        return [] if link is None else link.distrust(reason)

    def end_late(self, work: PendingWork, now: float, deadline: float) -> bool:
        """Give up attempts that have waited too long; return whether just now all have."""
        found = False
        for attempt in work.attempts:
            limit = deadline + self._allowance_at(attempt)
            if not attempt.late and self.waits(attempt, now) > limit:
                self._cancel(attempt)
                found = True
                work.avoid.add(attempt.address)
                work.reason = f"{attempt.address}: no answer within {limit:.3g} s"
        return found and all(x.late for x in work.attempts)

    def cancel_all(self, work: PendingWork) -> None:
        """Tell servers that no attempt that goes on is needed any longer."""
        for attempt in work.attempts:
            if not attempt.late:
                self._cancel(attempt)

    def _cancel(self, attempt: Attempt) -> None:
        attempt.late = True
        if (link := self._links.get(attempt.address)) is not None:
            link.cancel(attempt)

    def say_changed(self) -> None:
        """Wake who waits for a server."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_any(self, timeout: float) -> None:
        """Wait until a server is ready, or all have refused."""

        def settled() -> bool:
            states = {link.state for link in self}
            return "ready" in states or states == {"refused"}

        with self._changed:
            self._changed.wait_for(settled, timeout)

    def any_free(self, now: float) -> bool:
        """Return whether some server takes a task."""
        return any(link.free(self._depth, now) for link in self)

    def any_able(self, work: PendingWork) -> bool:
        """Return whether a server is there that may compute a task, and has not failed it."""
        ready = [link for link in self if link.state == "ready"]
        able = [link for link in ready if link.takes(work)]
        if ready and not able:
            work.reason = "it is above the caps of all servers (--max-tokens, --max-bytes)"
        return any(link.address not in work.avoid for link in able)

    def choose(self, work: PendingWork, now: float, but: str = "") -> ServerLink | None:
        """Return the server with room for a task that has it done soonest, or None.

        A server that has done nothing yet is held to be as fast as the fastest, and before equals
        the one that has rested longest is taken: so a new one is tried even where one server
        could do all.
        """
        free = [x for x in self if x.address != but and x.free(self._depth, now) and x.takes(work)]
        free = [x for x in free if x.address not in work.avoid] or free
        fastest = max((x.rate or 0.0 for x in free), default=0.0) or 1.0

        def order(link: ServerLink) -> tuple[float, float]:
            return (link.outstanding + work.cost) / (link.rate or fastest), link.last_result

        return min(free, key=order, default=None)

    def place(self, nbytes: int, avoid: Collection[str]) -> CachePlace | None:
        """Return where a cache of so many bytes goes: to the server with the most room, if any."""
        able = [x for x in self if x.address not in avoid and x.cache_room > nbytes]
        able = [x for x in able if x.place is not None]
        link = max(able, key=lambda x: x.cache_room, default=None)
        if link is None:
            return None
        link.cache_room -= nbytes  # until the server says again what it has
        return link.place

    def at(self, place: CachePlace) -> ServerLink | None:
        """Return the link to the server where a cache is, if it still may be there."""
        link = self._links.get(place.address)
        return link if link is not None and link.place == place else None

    def patience(self, most: float) -> int:
        """Return for how many milliseconds nothing needs to be done unless something arrives.

        That is at most so many seconds.
        """
        now = time.monotonic()
        if any(link.hurries(now) for link in self):
            return 0
        return min(int(1000 * most), *(x.patience() for x in self.transports.values()))

    def close(self) -> None:
        """Leave all servers."""
        for link in self:
            link.close()
        for transport in self.transports.values():
            transport.shutdown()
        self.context.term()
