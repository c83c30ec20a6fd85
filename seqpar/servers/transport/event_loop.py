"""The event loop for all gRPC calls of this process, which runs in a thread of its own.

gRPC remembers all event loops in which it was used, and passes events from loop to loop. If one of
these loops is closed, an event can be lost. All pools and servers of a process therefore share one
loop, which runs until Python exits.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from seqpar.servers.wire.request import ServersError

T = TypeVar("T")
# The lock is reentrant, because a signal handler can need it in the thread that holds it.
_lock = threading.RLock()
_thread: _LoopThread | None = None
# Whether this process was forked from a process that had used gRPC. If so, calls of gRPC would wait
# forever in this process.
_is_forked = False


class _LoopThread(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="seqpar-grpc", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.start()
        atexit.register(self.end)

    def run(self) -> None:
        self.loop.run_forever()

    def end(self) -> None:
        """End the loop and the thread, before Python exits."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.join()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the process's event loop. The first call starts it.

    Raises a ServersError if this process was forked from a process that had an event loop.
    """
    global _thread
    if _is_forked:
        raise ServersError("this process was forked from one that uses servers: spawn it instead")
    with _lock:
        if _thread is None:
            _thread = _LoopThread()
        return _thread.loop


def is_running() -> bool:
    return _thread is not None and _thread.is_alive()


def in_event_loop() -> bool:
    """Return whether the caller runs in the event loop's thread, which must not wait."""
    return threading.current_thread() is _thread


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    try:
        loop = event_loop()
    except ServersError:
        coroutine.close()
        raise
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def _forget() -> None:
    """Forget the thread in a forked process, in which the thread does not exist."""
    global _thread, _lock, _is_forked
    if _thread is not None:
        _is_forked = True
        atexit.unregister(_thread.end)
    _thread, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)
