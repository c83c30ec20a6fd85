"""Unix sockets that only this user's processes can bind and connect to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator

from seqpar.core.file_owners import fault_of_folder


class SocketLock:
    """The right to bind a path: a lock on a file next to it, held by one process at a time."""

    def __init__(self, path: str) -> None:
        """Take the lock; raise an OSError if another server holds it."""
        self._path = f"{path}.lock"
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise OSError("another server listens there") from None
            with contextlib.suppress(OSError):  # its previous holder has removed the file
                if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                    return
            os.close(self._file)

    def free(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)


@contextlib.contextmanager
def binding(path: str) -> Iterator[SocketLock]:
    """Bind a path within this context; the file that is made there is this user's alone.

    Free the lock when the server has stopped. Without it, gRPC would take over the file of a server
    that still listens, and a server that stops would delete the file of its successor.

    Raises:
        OSError: another user could replace the file, another server listens there, a file is there
            that is no socket, or other users may use the file that was made.
    """
    if (fault := fault_of_folder(path)) is not None:
        raise OSError(fault)
    lock = SocketLock(path)
    try:
        _check_free(path)
        before = os.umask(0o077)
        try:
            yield lock
        finally:
            os.umask(before)
        # The umask has no effect in a folder with a default access control list.
        if (fault := fault_of_socket(path)) is not None:
            raise OSError(fault)
    except BaseException:
        lock.free()
        raise


def _check_free(path: str) -> None:
    """Raise an OSError if the path is a file other than a socket, or if a server listens there."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("a file is there that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # connecting to a flooded server would block
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise OSError("another server listens there")


def fault_of_socket(path: str, file: int | None = None) -> str | None:
    """Return why other users could use or replace a Unix socket, or None.

    `file` is a descriptor of the socket's file, if it is open.
    """
    if (fault := fault_of_folder(path)) is not None:
        return fault
    try:
        status = os.lstat(path) if file is None else os.fstat(file)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISSOCK(status.st_mode):
        return f"{path} is not a socket"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"{path} may be used by other users (chmod 600)"
    return None


class PinnedSocket:
    """A Unix socket at which this user or root listens, as a client reaches it.

    `target` is gRPC's name of the socket's open file, not of its path. So a channel that connects
    again reaches the process that was checked, or none: a file is bound once, and whoever makes
    another file at the path, after the server has left, is not reached. To reach the server's
    successor, make a new PinnedSocket.
    """

    def __init__(self, path: str) -> None:
        """Check who listens there, without waiting and without sending anything.

        Raises:
            OSError: other users could use or replace the file, or nobody or another user listens.
        """
        try:
            # With O_PATH the file is neither read nor connected to; only Linux has that.
            self._file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(f"{path}: {error.strerror}") from None
        try:
            name = f"/proc/self/fd/{self._file}"
            fault = fault_of_socket(path, self._file) or _fault_of_listener(name)
            if fault is not None:
                raise OSError(fault)
        except BaseException:
            self.close()
            raise
        self.target = f"unix:{name}"

    def close(self) -> None:
        """Close the file; close channels to `target` before."""
        os.close(self._file)


def _fault_of_listener(path: str) -> str | None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
        if code == errno.EAGAIN:
            return "more connections wait there than the server accepts"
        if code == errno.ECONNREFUSED:
            return "nothing listens there"
        if code:
            return f"it cannot be connected to: {os.strerror(code)}"
        if user_at(probe) not in (0, os.geteuid()):
            return "the process that listens there is another user's"
    return None


def user_at(connected: socket.socket) -> int:
    """Return the user id of the process that listened at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    user: int = struct.unpack("3i", credentials)[1]
    return user
