"""Wakes a thread that polls sockets."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """A file descriptor that any thread or signal handler can make readable.

    Attributes:
        fd: the descriptor, for a poller.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._lock = threading.RLock()  # reentrant: a signal may arrive while its thread holds it

    def set(self) -> None:
        """Wake the polling thread. After `close` this does nothing."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
