"""Safe reading of files with certificates and private keys.

A file is used only if nobody except this user and root can change it. Reading never blocks, even if
the file is a fifo.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from seqpar.core.file_owners import fault_of, way_to
from seqpar.servers.wire.texts import printable

T = TypeVar("T")
_MOST_BYTES = 2**16  # the most bytes that are read from a file
# If a file changes twice within a tick of the file system's clock, its timestamps do not show the
# second change. Files are therefore read again until their last change is older than this.
_SETTLED_SECONDS = 1.0


class Unsafe(ValueError):
    """Raised if another user can write a file or folder of keys, or read a private key."""


def shown(path: Path) -> str:
    return printable(str(path))


def check_folder(folder: Path) -> None:
    """Raise an `Unsafe` error if users other than this user and root can change a folder.

    All parent folders of the folder are also checked. In parent folders such as /tmp, other users
    may add files, but must not be able to replace files of this user.
    """
    real = os.path.realpath(folder)
    for name, status in way_to(str(folder)):
        _check_owner(name, status, may_be_sticky=name != real)


def _check_owner(name: str, status: os.stat_result, may_be_sticky: bool = False) -> None:
    fault = fault_of(name, status, trusts_group=False, may_be_sticky=may_be_sticky)
    if fault is not None:
        raise Unsafe(f"keys: {printable(fault)}")


def read(file: Path) -> bytes:
    """Return the content of a regular file, or raise a ValueError that names the unsafe file.

    A private key that users other than the owner can read is unsafe. There is one exception: if
    root owns the file and this process does not run as root, the file's group may read the key,
    because Kubernetes mounts secrets in this way.
    """
    # With O_NONBLOCK, opening a fifo does not wait for a process that writes to the fifo.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(file, flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"keys: {shown(file)} must be a regular file")
            _check_owner(str(file), status)
            others = 0o037 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
            if file.suffix == ".key" and status.st_mode & others:
                raise Unsafe(f"keys: {shown(file)} must be readable by its owner alone (chmod 600)")
            return os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> ValueError:
    return ValueError(f"keys: {shown(file)} cannot be read: {error.strerror}")


class Watched(Generic[T]):
    """A value that is loaded from files, and is loaded again when a file has changed."""

    def __init__(self, load: Callable[..., T], *files: Path) -> None:
        self._load, self.files = load, files
        self._seen: object = None  # what `os.stat` returned for the files of the current value
        self.value: T | None = None

    def look(self) -> bool:
        """Load the value again if a file has changed. Returns whether the value has changed.

        If the value cannot be loaded, this method raises a ValueError and keeps the old value.
        """
        old = self.value
        try:
            stats = [os.stat(file) for file in self.files]
        except OSError as error:
            raise _unreadable(Path(error.filename), error) from None
        now = [(x.st_dev, x.st_ino, x.st_mtime_ns, x.st_ctime_ns, x.st_size) for x in stats]
        if now != self._seen:
            self.value = self._load(*self.files)
        if time.time() - max(x.st_ctime for x in stats) > _SETTLED_SECONDS:
            self._seen = now
        return self.value != old
