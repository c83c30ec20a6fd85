"""Protection of a server's Unix socket from other users.

A server checks that only processes of this user can bind and use the socket. A client checks that
the process at the socket belongs to this user or root.
"""

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
    """The right to bind a path: a lock on the file PATH.lock, which only one process can hold."""

    def __init__(self, path: str) -> None:
        """Take the lock, or raise an OSError if another process holds it."""
        self._path = f"{path}.lock"
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise OSError("another server listens there") from None
            # The previous holder can have removed the file meanwhile. The lock is then on a file
            # that no longer exists at the path, and must be taken again.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                    return
            os.close(self._file)

    def free(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)


@contextlib.contextmanager
def binding(path: str) -> Iterator[SocketLock]:
    """Within this context, bind a socket to the path. Only this user will be able to use the
    socket.

    Yields a lock. Free the lock when the server has stopped. While one server holds the lock, no
    other server can bind the path.

    Raises:
        OSError: other users could replace the file, a server listens at the path, the path has a
            file that is not a socket, or other users may use the socket that was made.
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
        # The permissions of the socket are checked, because the umask has no effect in a folder
        # with a default access control list.
        if (fault := fault_of_socket(path)) is not None:
            raise OSError(fault)
    except BaseException:
        lock.free()
        raise


def _check_free(path: str) -> None:
    """Raise an OSError if there is a file at the path, unless it is a socket at which nobody
    listens.
    """
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("a file is there that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # otherwise, connecting to a server with a full queue would block
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise OSError("another server listens there")


def fault_of_socket(path: str, file: int | None = None) -> str | None:
    """Return the reason why other users could use or replace a Unix socket, or None.

    `file` is an open descriptor of the socket's file. Without it, the file at the path is checked.
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
    """A server's Unix socket, which stays the same while a client connects to it.

    The constructor checks that a process of this user or of root listens at the socket. The
    constructor also opens the file of the socket, and `target` is an address that refers to this
    open file. If another process later makes a new socket at the path, `target` still refers to the
    old file. No second process can ever listen at the old file, so a channel to `target` reaches
    the checked process or no process. To reach a later server at the path, make a new PinnedSocket.
    """

    def __init__(self, path: str) -> None:
        """Check who listens at the path. Nothing is sent, and the check does not wait.

        Raises:
            OSError: other users could use or replace the file, or neither this user nor root
                listens.
        """
        try:
            # O_PATH opens the file without reading it or connecting to it. Only Linux has O_PATH.
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
        """Close the file. Close all channels to `target` first."""
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
    """Return the user id of the process that has called `listen` at the other end of a socket."""
    size = struct.calcsize("3i")
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    user: int = struct.unpack("3i", credentials)[1]
    return user
