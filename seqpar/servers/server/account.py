"""The division of a server's memory, calls and bandwidth among clients.

Each *name*, which is the name in a client's certificate, has one account. A client therefore gets
no larger share by opening more sessions. If a server has no certificates, all clients have the name
"".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple


class Client(NamedTuple):
    """A session, and the name in the certificate that opened it.

    A server finds the data of a client only with the session and the name together. A client that
    has learnt the session of another client therefore cannot read that client's data.
    """

    session: bytes
    name: str = ""


class TooManyError(Exception):
    """A name asks for more than its limit."""


class Account:
    """An account of a limited resource, such as bytes of memory: how much of the resource each name
    has.

    A name that has nothing may take all that is free. A name that has an amount already may take
    more only if, afterwards, the free amount is at least as large as the amount of this name. If n
    names take as much as they can in small steps, 1/(n + 1) of the resource stays free. The second
    rule does not apply to the name "", because clients without certificates share the whole
    resource.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._held: Counter[str] = Counter()  # how much each name has
        self._waiting: list[asyncio.Future[None]] = []  # done as soon as a name has less

    def fits(self, name: str, size: int) -> bool:
        """Return whether a name may take `size` now."""
        own, free = self._held[name], self.most - self.held - size
        return free >= 0 and (not name or not own or own + size <= free)

    def room_of(self, name: str) -> int:
        """Return the most that a name may take now."""
        own, free = self._held[name], self.most - self.held
        return max(0, (free - own) // 2) if name and own else free

    def count(self, name: str, size: int) -> None:
        """Add `size`, which may be negative, to what a name has."""
        self.held += size
        self._held[name] += size
        if not self._held[name]:
            del self._held[name]

    def take(self, name: str, size: int) -> Callable[[], None]:
        """Take `size`, and return a function that gives it back.

        If nobody calls the function, `size` is given back when the current asyncio task ends. This
        task ends when gRPC drops the call. Until then, gRPC may hold parts of a reply that were not
        sent yet.

        Raises:
            TooManyError: the name may not take as much now.
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
        """Wait until a name may take `size`, and then do what `take` does."""
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
    """A limit of how many calls of one name run an operation at the same time, such as receiving a
    chunk.

    A call needs a *turn* for the operation. While all turns of a name are taken, further calls of
    the name wait, and gRPC's flow control stops the senders. A name with many connections therefore
    gets no more bandwidth than a name with one connection.
    """

    def __init__(self, most: int) -> None:
        """`most` is the number of turns that the calls of each name have together."""
        self._most = most
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()  # how many calls have or want a turn, by name

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
