"""Connect a heartbeat to the key-value store of its group.

A *heartbeat* is a thread on each rank that tells other ranks, through the store, that the rank is
alive. It needs more than torch's client of a store, for three reasons:

* If the process that keeps the store has closed the connection, the client writes a stack trace to
  stderr. The process may close the connection whenever it exits normally.
* If the process that keeps the store is gone, connecting takes as long as the group's timeout.
* If the process that keeps the store is stopped, connecting and all other calls never return. Code
  that must not wait forever uses `answer_of`.

A connection therefore has an additional plain socket to the port of the store, which carries no
data and shows when the store is gone. All groups of a process share one such socket per port,
because the process that keeps the store can open only a limited number of files.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
_PARTS = 10  # `answer_of` waits in this number of intervals


class Connection:
    """A connection to the key-value store of a group.

    The methods read and write keys. They raise a RuntimeError if the process that keeps the store
    is gone.

    Attributes:
        host: the address of this machine as the store sees it. Other ranks can reach this machine
            at this address. If the store does not use TCP, `host` is the loopback address.
    """

    def __init__(self, store: Store) -> None:
        """Connect to the process that keeps `store`. If a signal has stopped the process that keeps
        `store`, the constructor never returns.
        """
        self.host = "127.0.0.1"
        self._idle: _Idle | None = None
        plain = store
        while isinstance(plain, PrefixStore):
            plain = plain.underlying_store
        if isinstance(plain, TCPStore):
            self._idle = _Idle.to(plain.host, plain.port)
            self.host = self._idle.host
        self._store = store.clone()  # type: ignore[attr-defined]

    @classmethod
    def open(cls, store: Store, seconds: float) -> Connection:
        """Return a connection to a store. Raise a RuntimeError if the connection is refused or
        takes longer than `seconds`.
        """
        return answer_of(lambda: cls(store), seconds)

    def set(self, key: str, value: str, /) -> None:
        self._open_store().set(key, value)

    def check(self, keys: list[str], /) -> bool:
        return self._open_store().check(keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return self._open_store().multi_get(keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._open_store().compare_set(key, expected, desired)

    def _open_store(self) -> Store:
        if self._idle is not None and self._idle.ended():
            raise RuntimeError("the store has closed its connections")
        return self._store


def answer_of(call: Callable[[], T], seconds: float) -> T:
    """Return the result of a call to a store. Raise a RuntimeError if the call takes longer than
    `seconds`.

    The function waits in several short intervals. If this process is suspended during one interval,
    the store still has the remaining intervals to answer. A call that takes too long continues in
    its thread.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        except (RuntimeError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="seqpar store", daemon=True)
    thread.start()
    for _ in range(_PARTS):
        thread.join(seconds / _PARTS)  # returns immediately when the thread has ended
    if answers:
        return answers[0]
    raise RuntimeError(errors[0] if errors else f"no answer in {seconds:.1f} s")


class _Idle:
    """A plain socket to a store that carries no data. The socket becomes readable when the process
    that keeps the store closes the connection.
    """

    def __init__(self, host: str, port: int) -> None:
        connection = socket.create_connection((host, port))
        self.host = connection.getsockname()[0]  # the address of this end
        self.descriptor = connection.detach()
        # The socket stays open at exit, because the last beat is written later.
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    def ended(self) -> bool:
        poll = select.poll()  # a new object for each call, because threads must not share one
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    @classmethod
    def to(cls, host: str, port: int) -> _Idle:
        key = os.getpid(), host, port
        known = _idle.get(key)
        if known is None or known.ended():
            known = _idle[key] = cls(host, port)
        return known


_idle: weakref.WeakValueDictionary[tuple[int, str, int], _Idle] = weakref.WeakValueDictionary()
