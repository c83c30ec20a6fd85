"""Where servers are: addresses, which need keys unless they stay on this machine."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from pathlib import Path

from seqpar.core.arguments import shown


def check_address(name: str, address: object) -> str:
    """Return an address, ipc://PATH or tcp://HOST:PORT, or raise a ValueError that names it."""
    if isinstance(address, str) and "\0" not in address:
        if address.startswith("ipc:///") and 7 < len(address.encode()) <= 6 + 107:
            return address
        found = re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[\w.*-]+):(\d+|\*)", address)
        if found and (found[2] == "*" or int(found[2]) < 2**16):
            return address
    expected = "ipc:///PATH (of at most 107 bytes) or tcp://HOST:PORT"
    raise ValueError(f"{name} must be {expected}, got {shown(address)}")


def check_peer(name: str, address: object) -> str:
    """Return an address that one can connect to, or raise a ValueError that names it."""
    found = check_address(name, address)
    host, _, port = found.removeprefix("tcp://").rpartition(":")
    if not is_own(found) and ("*" in host or not port.isdecimal() or not int(port)):
        raise ValueError(f"{name} must name the host and port of a server, got {found}")
    return found


def is_local(address: str) -> bool:
    """Return whether only processes of this machine can be at the other end of an address."""
    if is_own(address):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own(address: str) -> bool:
    """Return whether only processes of this user can be at the other end: the file is theirs."""
    return str(address).startswith("ipc:")


def path_of(address: str) -> str:
    """Return the file of an address ipc://PATH."""
    return address.removeprefix("ipc://")


def fault_of_folder(path: str) -> str | None:
    """Return why another user could replace a file, by its name, or None.

    Each folder above it must be this user's or root's, and so must each symbolic link. A folder
    that others may write to must be sticky, so that they cannot rename what is not theirs.
    """
    names = [*Path(os.path.abspath(path)).parents]
    names += [*Path(os.path.realpath(os.path.dirname(path)) or "/").parents]
    names.append(Path(os.path.realpath(os.path.dirname(path))))
    for folder in dict.fromkeys(names):
        try:
            found = os.lstat(folder)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if found.st_uid not in (0, os.geteuid()):
            return f"{folder} belongs to another user"
        if stat.S_ISLNK(found.st_mode):
            continue
        mode, own_group = found.st_mode, found.st_gid in (0, os.getegid())
        writable = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not own_group)
        if writable and not mode & stat.S_ISVTX:
            return f"{folder} may be written to by other users (chmod o-w,g-w)"
    return None


def fault_of_socket(path: str) -> str | None:
    """Return why a Unix socket may not be trusted: it, or its folder, is not this user's alone."""
    if (fault := fault_of_folder(path)) is not None:
        return fault
    try:
        found = os.lstat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISSOCK(found.st_mode):
        return f"{path} is not a socket"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{path} may be used by other users (chmod 600)"
    return None


def check_keys(name: str, address: str, keys: object) -> None:
    """Raise a ValueError unless an address is local, or there are keys."""
    if keys is None and not is_local(address):
        how = "make them with `python -m seqpar keygen`"
        raise ValueError(f"{name}: {address} is not on this machine, so it needs keys: {how}")
