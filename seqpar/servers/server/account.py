"""The division of a server's memory, calls and bandwidth among clients.

A *name* is the name in a client's certificate. All sessions of a name share one account, so a
client gets no more by opening several sessions. If a server has no certificates, all clients have
the name "".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple


class Client(NamedTuple):
    """The key of the data of a client on a server: a session, and the name of the client."""

    session: bytes
    name: str = ""


class TooManyError(Exception):
    """The clients with one name asked for more of a resource than they can get now."""


class Account:
    """Divides a limited resource, such as bytes of memory, among names.

    A name is the name in a client's certificate, and stands for all clients with this name. A name
    that holds nothing can reserve all that is free. After a name that already holds something has
    reserved more, the free amount must be at least the amount that the name holds. If n names
    reserve as much as they can in small steps, 1/(n + 1) of the resource therefore stays free. The
    rule does not apply to the name "", because clients without certificates share the whole
    resource.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._held: Counter[str] = Counter()  # how much each name holds
        # Each is resolved when a name releases something.
        self._waiting: list[asyncio.Future[None]] = []

    def fits(self, name: str, size: int) -> bool:
        """Return whether a name can reserve `size` now."""
        own, free = self._held[name], self.most - self.held - size
        return free >= 0 and (not name or not own or own + size <= free)

    def room_of(self, name: str) -> int:
        """Return the largest amount that the clients with this name can reserve now."""
        own, free = self._held[name], self.most - self.held
        return max(0, (free - own) // 2) if name and own else free

    def count(self, name: str, size: int) -> None:
        """Add `size`, which can be negative, to the amount that the clients with a name hold."""
        self.held += size
        self._held[name] += size
        if not self._held[name]:
            del self._held[name]

    def take(self, name: str, size: int) -> Callable[[], None]:
        """Reserve `size` units of the resource for a client's name, and return a function that
        releases the units.

        If the function is not called, the units are released when the current asyncio task ends.

        Raises:
            TooManyError: the name cannot reserve `size` now.
        """
        if not self.fits(name, size):
            raise TooManyError
        self.count(name, size)
        task = asyncio.current_task()
        assert task is not None

        def give(_: object = None) -> None:
            task.remove_done_callback(give)
            self._give(name, size)

        task.add_done_callback(give)
        return give

    async def wait_and_take(self, name: str, size: int) -> Callable[[], None]:
        while not self.fits(name, size):
            changed = asyncio.get_running_loop().create_future()
            self._waiting.append(changed)
            await changed
        return self.take(name, size)

    def _give(self, name: str, size: int) -> None:
        self.count(name, -size)
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)


class Turns:
    """Limits how many calls of one name can do something, such as receive data, at the same time.

    A name is the name in a client's certificate, and stands for all clients with this name. A call
    needs a *turn*. While all turns of a name are in use, further calls of the name wait, and gRPC's
    flow control stops the senders. A name with many connections therefore gets no more bandwidth
    than a name with one connection.
    """

    def __init__(self, most: int) -> None:
        """`most` is the number of turns that all calls of a name share."""
        self._most = most
        self._turns: dict[str, asyncio.Semaphore] = {}
        # The number of calls that have or want a turn, by name.
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        self._users[name] += 1
        turns = self._turns.setdefault(name, asyncio.Semaphore(self._most))
        try:
            async with turns:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._turns[name]
