"""Move work from overloaded servers to servers that have time, sending few bytes.

Each server has a limit of work. The *surplus* of a server is its work above the limit, and the
*room* of a server is its free work below the limit. A move transfers work from a *giver*, a server
with a surplus, to a *taker*, a server with room. *Guest* work is work that a server has received by
a move. Guest keys are the keys that a server has received for guest work.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from heapq import nlargest
from typing import NamedTuple

import numpy as np

from seqpar.balance.disaggregation.cells import Intervals, KeyPlacement, union
from seqpar.balance.disaggregation.rectangles import Cell, CellPart, Prices, cut
from seqpar.costs.grid import Floats
from seqpar.layout.tasks.tasks import Parts

MAX_CELLS_PER_STEP = 3  # only the giver's largest cells are cut
MAX_PARTS_COMPUTED = 3  # only parts with the lowest bounds are computed exactly
MAX_HOLDERS = 2  # takers that are tried because they have keys of the cell's document
MAX_SERVERS_SCANNED = 64  # if more servers have keys of the document, these takers are not tried
# Such a taker needs room for this fraction of the work that the first candidate would receive.
MIN_TASK_SHARE = 1 / 16
MAX_OTHER_SERVERS = 8  # takers with the most room that are tried if no other part fits
MAX_ATTEMPTS = 4  # attempts to cut a part that fits into a server's time and memory
LIMIT_TOLERANCE = 2e-3  # a surplus of at most this fraction of the limit is accepted


class Terms(NamedTuple):
    memory: Floats  # (servers,) bytes that may be sent to each server
    query: float  # bytes of a row of queries
    key: float  # bytes of a row of keys
    exposed: float  # the time for sending a byte to a server, in units of work
    tile: int  # number of query rows that a kernel computes together


class Move(NamedTuple):
    """A part of a cell that is moved to a server. `price` is the number of bytes sent per unit of
    work.
    """

    price: float
    work: float
    server: int
    cell: Cell
    part: CellPart


class Offer(NamedTuple):
    """A possible move.

    Offers are sorted by `least`, a lower bound on the bytes sent per unit of work.
    """

    least: float
    server: int
    cell: Cell
    prices: Prices
    room: float


class ServerLoads:
    """The work, the memory and the received bytes of each server, while parts of cells are
    moved.
    """

    def __init__(
        self, cells: Parts, work: Floats, keys: KeyPlacement, limits: Floats, terms: Terms
    ) -> None:
        self._cells, self._keys, self._terms = cells, keys, terms
        servers = limits.size
        self._limits = limits.tolist()
        self._home = np.bincount(cells.servers, work, servers).tolist()
        self._guests = [0.0] * servers
        self._received = (keys.received(servers) * terms.key).tolist()
        self._memory = (terms.memory - np.array(self._received)).tolist()
        self._order = np.lexsort((-work, cells.servers))
        self._pairs = cells.areas()
        self._rates = work / self._pairs
        self._rooms: dict[int, float] = {}  # by server, for servers that have room
        in_order = cells.servers[self._order]
        self._edges = np.searchsorted(in_order, np.arange(servers + 1)).tolist()
        # The remaining cells of servers that gave parts away, largest first.
        self._left: dict[int, list[Cell]] = {}
        self._moved: list[tuple[CellPart, Cell, int]] = []
        self._guest_keys: dict[int, dict[int, list[tuple[int, int]]]] = {}  # by document, server

    def cells_now(self) -> Parts:
        stays = ~np.isin(self._cells.servers, [*self._left])
        rows = [(*cell[1:8], server) for server, left in self._left.items() for cell in left]
        for part, cell, server in self._moved:
            where = part.q_start, cell.q_stop, part.k_start, part.k_stop
            rows.append((cell.document, *where, cell.low, cell.high, server))
        changed = np.array(rows, np.int64).reshape(-1, 8).T
        kept = self._cells.take(stays)
        return Parts(*(np.concatenate(pair) for pair in zip(kept, changed, strict=True)))

    def loads(self) -> Floats:
        return np.array(self._home) + self._guests

    def ends(self) -> Floats:
        servers = range(len(self._home))
        return np.array([self._own(server) + self._guests[server] for server in servers])

    def room(self, server: int) -> float:
        """Return how much more work a server can receive. A negative number says how much work the
        server has above its limit.
        """
        return self._limits[server] - self._own(server) - self._guests[server]

    def _own(self, server: int) -> float:
        """Return the time at which a server can start work from other servers, in units of the time
        for one unit of work.

        A server first computes the work of its own queries, and then waits for data that has not
        arrived yet.
        """
        return max(self._home[server], self._terms.exposed * self._received[server])

    def level(self) -> None:
        """Move work from the server that exceeds its limit of work most, until no server exceeds
        its limit.
        """
        # If a server with a surplus cannot give away more work, all limits are raised by the factor
        # with which this server has no surplus.
        while (stuck := self._move()) is not None:
            late = (self._limits[stuck] - self.room(stuck)) / self._limits[stuck]
            self._limits = [limit * late for limit in self._limits]

    def _move(self) -> int | None:
        """Move attention between servers until no server has more work than its limit.

        If a server cannot give work away while other servers still have too much work, the method
        stops and returns this server. Otherwise it returns None.
        """
        rooms = [(self.room(server), server) for server in range(len(self._limits))]
        givers = [(room, server) for room, server in rooms if self._has_surplus(room, server)]
        takers = sorted((room, server) for room, server in rooms if room > 0)
        self._rooms = {server: room for room, server in takers}
        heapq.heapify(givers)
        while givers and takers:
            surplus, giver = -givers[0][0], givers[0][1]
            move = self._best(giver, surplus, takers)
            if move is None:
                if self._limits[giver] and len(givers) > 1:
                    return giver
                heapq.heappop(givers)
                continue
            taker = move.server
            del takers[bisect_left(takers, (self._rooms.pop(taker), taker))]
            self._make(giver, move)
            if (room := self.room(taker)) > 0:
                insort(takers, (room, taker))
                self._rooms[taker] = room
            if self._has_surplus(room := self.room(giver), giver):
                heapq.heapreplace(givers, (room, giver))
            else:
                heapq.heappop(givers)
        return None

    def _has_surplus(self, room: float, server: int) -> bool:
        return room < -LIMIT_TOLERANCE * self._limits[server]

    def _best(self, giver: int, surplus: float, takers: list[tuple[float, int]]) -> Move | None:
        # Larger parts send fewer bytes per unit of work. The first candidate is therefore the
        # server with the least room that suffices for the whole surplus or, if no room suffices,
        # the server with the most room. Further candidates are servers that have keys of the
        # document.
        fitting = bisect_left(takers, (surplus, -1))
        room, server = takers[fitting if fitting < len(takers) else -1]
        least = min(surplus, room) * MIN_TASK_SHARE
        offers: list[Offer] = []
        for cell in self._cells_of(giver)[:MAX_CELLS_PER_STEP]:
            foreign = self._foreign(cell, giver)
            for taker in {server, *self._holders(cell.document, least)}:
                room, held = self._rooms[taker], self._held(taker, cell.document)
                prices = Prices(self._terms.query, self._terms.key, held, foreign)
                price = prices.least(cell, min(surplus, room) / cell.rate) / cell.rate
                offers.append(Offer(price, taker, cell, prices, room))
        best, looks = None, 0
        for offer in sorted(offers):
            if looks == MAX_PARTS_COMPUTED or (best is not None and offer.least >= best.price):
                break
            move = self._fit(offer, surplus)
            if move is not None:
                looks += 1
                best = move if best is None or move.price < best.price else best
        return best or self._any(giver, surplus, takers)

    def _any(self, giver: int, surplus: float, takers: list[tuple[float, int]]) -> Move | None:
        """Return a move of work from the server `giver` to a server that can receive much more
        work. Return None if no move fits.
        """
        for room, server in takers[: -MAX_OTHER_SERVERS - 1 : -1]:
            for cell in self._cells_of(giver):
                held = self._held(server, cell.document)
                prices = Prices(self._terms.query, self._terms.key, held, ())
                move = self._fit(Offer(0.0, server, cell, prices, room), surplus)
                if move is not None:
                    return move
        return None

    def _fit(self, offer: Offer, surplus: float) -> Move | None:
        _, server, cell, prices, room = offer
        wanted, at_least = min(surplus, room) / cell.rate, surplus <= room
        own = self._own(server)
        for _ in range(MAX_ATTEMPTS):
            part = cut(cell, wanted, prices, self._terms.tile, at_least)
            if part is None:
                return None
            work, added = part.pairs * cell.rate, part.rows * prices.query + part.keys * prices.key
            waits = max(0.0, self._terms.exposed * (self._received[server] + added) - own)
            allowed = (room - waits) / work
            if added > self._memory[server]:
                allowed = min(allowed, (self._memory[server] / added) ** 2)
            if allowed >= 1:
                price = (added - part.freed * prices.key) / work
                return Move(price, work, server, cell, part)
            if allowed <= 0:
                return None
            wanted, at_least = min(wanted, part.pairs) * allowed, False
        return None

    def _make(self, giver: int, move: Move) -> None:
        _, work, server, cell, part = move
        self._home[giver] -= work
        self._guests[server] += work
        self._receive(server, part.rows * self._terms.query + part.keys * self._terms.key)
        self._receive(giver, -part.freed * self._terms.key)
        self._moved.append((part, cell, server))
        guests = self._guest_keys.setdefault(cell.document, {})
        guests.setdefault(server, []).append((part.k_start, part.k_stop))
        left = self._cells_of(giver)
        left.remove(cell)
        for rest in cell.without(part):
            insort(left, rest, key=lambda cell: -cell.pairs * cell.rate)

    def _receive(self, server: int, nbytes: float) -> None:
        self._received[server] += nbytes
        self._memory[server] -= nbytes

    def _cells_of(self, server: int) -> list[Cell]:
        found = self._left.get(server)
        if found is None:
            index = self._order[self._edges[server] : self._edges[server + 1]]
            columns = self._pairs[index], *self._cells.take(index)[:-1], self._rates[index]
            rows = zip(*(column.tolist() for column in columns), strict=True)
            found = self._left[server] = [Cell(*row) for row in rows]
        return found

    def _holders(self, document: int, least: float) -> list[int]:
        """Return at most `MAX_HOLDERS` servers that have keys of a document and room for `least`
        work.
        """
        # If more than `MAX_SERVERS_SCANNED` servers have keys of the document, no search is needed:
        # the first candidate probably has some too.
        found, guests = set[int](), self._guest_keys.get(document, {})
        if len(guests) <= MAX_SERVERS_SCANNED:
            found.update(guests)
        if 1 < self._keys.counts[document] <= MAX_SERVERS_SCANNED:
            found.update(self._keys.servers(document))
        roomy = [server for server in found if self._rooms.get(server, -1.0) >= least]
        return nlargest(MAX_HOLDERS, roomy, lambda server: (self._rooms[server], server))

    def _held(self, server: int, document: int) -> Intervals:
        held = self._keys.of(server, document) if self._keys.counts[document] > 1 else ()
        guests = self._guest_keys.get(document, {}).get(server)
        return held if guests is None else union([*held, *guests])

    def _foreign(self, cell: Cell, giver: int) -> Intervals:
        """Return the keys that the server `giver` receives for the cell, and for no other cell."""
        if self._keys.counts[cell.document] == 1:
            return ()
        for other in self._cells_of(giver):
            apart = other.k_stop <= cell.k_start or other.k_start >= cell.k_stop
            if other.document == cell.document and other is not cell and not apart:
                return ()
        return self._keys.foreign(giver, cell.document)
