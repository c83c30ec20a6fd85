"""Wake a thread that polls sockets."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """A file descriptor that becomes readable when any thread, or a signal, says so.

    Attributes:
        fd: the descriptor, to be polled.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._lock = threading.RLock()  # a signal may come while its thread holds it

    def set(self) -> None:
        """Wake the thread, if it still polls."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        os.eventfd_read(self.fd)

    def close(self) -> None:
        """Free the descriptor."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
