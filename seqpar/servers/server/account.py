"""Divides memory and calls among the names in clients' certificates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple


class Client(NamedTuple):
    """A session, and the name in the certificate that opened it.

    What a server keeps is stored under both. So one name never reaches what belongs to another.
    """

    session: bytes
    name: str = ""  # "" for all clients of a server without certificates


class TooManyError(Exception):
    """The name would hold more than it may."""


class Account:
    """What each name has of something that is limited, such as bytes of memory.

    After a name has taken something, at least as much as it holds must be free. So n names that
    take all they can leave 1/(n + 1) of the whole. A name that has nothing may take all that is
    free. Clients without certificates have the name "", and share all.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._held: Counter[str] = Counter()  # by name
        self._waiting: list[asyncio.Future[None]] = []  # until somebody has less

    def fits(self, name: str, size: int) -> bool:
        """Return whether a name may have `size` more now."""
        own, free = self._held[name], self.most - self.held - size
        return free >= 0 and (not name or not own or own + size <= free)

    def room_of(self, name: str) -> int:
        """Return how much more a name may have."""
        own, free = self._held[name], self.most - self.held
        return max(0, (free - own) // 2) if name and own else free

    def count(self, name: str, size: int) -> None:
        """Count `size` more, or less if it is negative."""
        self.held += size
        self._held[name] += size
        if not self._held[name]:
            del self._held[name]

    def take(self, name: str, size: int) -> Callable[[], None]:
        """Count `size` more, or raise a TooManyError; return a function to call once it is free.

        It is free at the latest when this task of asyncio ends. A call's task ends only when gRPC
        gives the call up. Until then gRPC may hold parts of a reply that was not sent.
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
        """Wait until a name may have `size` more, and take it."""
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
    """Lets at most a few calls of each name do the same thing at a time, such as receive a chunk.

    The name's other calls wait, and gRPC's flow control holds their senders. So a name with many
    connections gets no more of the bandwidth than a name with one.
    """

    def __init__(self, most: int) -> None:
        """Each name has `most` turns at a time."""
        self._most = most
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()  # of each semaphore

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
