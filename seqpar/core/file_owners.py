"""Find out whether another user could change a file, from the owners and modes on its path."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

_MAX_LINKS = 40  # symbolic links on the path of a file, as in Linux


def fault_of_folder(path: str) -> str | None:
    """Return a text that says why another user could put a different file at a path, or None if no
    other user could.

    This user or root must own each folder and each symbolic link on the path of the file's folder.
    A folder to which other users can write must be sticky, so that other users cannot rename files
    of this user. The file itself need not exist.
    """
    try:
        for name, status in way_to(os.path.dirname(os.path.join(os.getcwd(), path))):
            if (fault := fault_of(name, status)) is not None:
                return fault
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def read_file(path: str) -> bytes:
    """Return the content of a file that only this user or root can change, without ever waiting for
    the file.

    The path may be a symbolic link, but must lead to a regular file. This user or root must own the
    file, the links and the folders, and other users must not be able to write to them.

    Raises:
        ValueError: another user could change the file, or the file is not a regular file.
        OSError: the file is missing or cannot be read.
    """
    for name, checked in way_to(path):
        if (fault := fault_of(name, checked)) is not None:
            raise ValueError(fault)
    if not stat.S_ISREG(checked.st_mode):
        raise ValueError(f"{path} must be a regular file")
    # Without O_NONBLOCK, opening a fifo would wait for a process that writes to it.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not os.path.samestat(checked, os.fstat(file.fileno())):
            raise OSError(f"{path} was replaced while it was read")
        return file.read()


def fault_of(
    name: str, status: os.stat_result, *, trusts_group: bool = True, may_be_sticky: bool = True
) -> str | None:
    """Return a text that says why another user could change a file, a folder or a link, or None if
    no other user could.

    Args:
        name: the name of the file in the text.
        status: the status of the file. For a link, this is the status of the link and not of the
            link's target.
        trusts_group: whether this process's group and root's group may write to the file.
        may_be_sticky: whether other users may add files if `name` is a sticky folder.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"{name} belongs to another user"
    mode, trusted = status.st_mode, trusts_group and status.st_gid in (0, os.getegid())
    writable = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not trusted)
    sticky = may_be_sticky and stat.S_ISDIR(mode) and mode & stat.S_ISVTX
    if writable and not stat.S_ISLNK(mode) and not sticky:
        return f"{name} may be written to by other users (chmod o-w,g-w)"
    return None


def way_to(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all folders and links through which the system reaches a path, and the file at the
    path.
    """
    yield "/", os.lstat("/")
    folder, links = "/", 0
    names = os.path.join(os.getcwd(), path).split("/")[::-1]
    while names:
        name = names.pop()
        if name == "..":
            folder = os.path.dirname(folder)
        if name in ("", ".", ".."):
            continue
        found = os.path.join(folder, name)
        status = os.lstat(found)
        yield found, status
        if not stat.S_ISLNK(status.st_mode):
            folder = found
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), found)
        target = os.readlink(found)
        names += target.split("/")[::-1]
        folder = "/" if target.startswith("/") else folder
