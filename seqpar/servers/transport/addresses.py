"""Addresses of servers, and who could listen there instead of a server."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from pathlib import Path

from seqpar.core.arguments import shown


def check_address(name: str, address: object) -> str:
    """Return an address (ipc://PATH or tcp://HOST:PORT), or raise a ValueError."""
    if isinstance(address, str) and "\0" not in address:
        if address.startswith("ipc:///") and 7 < len(address.encode()) <= 6 + 107:
            return address
        match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[\w.*-]+):(\d+|\*)", address)
        if match and (match[2] == "*" or int(match[2]) < 2**16):
            return address
    expected = "ipc:///PATH (of at most 107 bytes) or tcp://HOST:PORT"
    raise ValueError(f"{name} must be {expected}, got {shown(address)}")


def check_peer(name: str, address: object) -> str:
    """Return an address that a client can connect to, or raise a ValueError."""
    checked = check_address(name, address)
    host, _, port = checked.removeprefix("tcp://").rpartition(":")
    if not is_own(checked) and ("*" in host or not port.isdecimal() or not int(port)):
        raise ValueError(f"{name} must name the host and port of a server, got {checked}")
    return checked


def is_local(address: str) -> bool:
    """Return whether only processes of this machine can be at an address."""
    if is_own(address):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own(address: str) -> bool:
    """Return whether an address is a Unix socket, which only this user's processes can use."""
    return str(address).startswith("ipc:")


def path_of(address: str) -> str:
    return address.removeprefix("ipc://")


def fault_of_folder(path: str) -> str | None:
    """Return why another user could replace the file at a path, or None.

    This user or root must own each folder above it and each symbolic link. A folder that others may
    write to must be sticky, so that they cannot rename files of this user.
    """
    names = [*Path(os.path.abspath(path)).parents]
    names += [*Path(os.path.realpath(os.path.dirname(path)) or "/").parents]
    names.append(Path(os.path.realpath(os.path.dirname(path))))
    for folder in dict.fromkeys(names):
        try:
            status = os.lstat(folder)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if status.st_uid not in (0, os.geteuid()):
            return f"{folder} belongs to another user"
        if stat.S_ISLNK(status.st_mode):
            continue
        mode, own_group = status.st_mode, status.st_gid in (0, os.getegid())
        writable = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not own_group)
        if writable and not mode & stat.S_ISVTX:
            return f"{folder} may be written to by other users (chmod o-w,g-w)"
    return None


def fault_of_socket(path: str) -> str | None:
    """Return why other users could use or replace a Unix socket, or None."""
    if (fault := fault_of_folder(path)) is not None:
        return fault
    try:
        status = os.lstat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISSOCK(status.st_mode):
        return f"{path} is not a socket"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"{path} may be used by other users (chmod 600)"
    return None


def check_keys(name: str, address: str, keys: object) -> None:
    """Raise a ValueError if an address is on another machine and `keys` is None."""
    if keys is None and not is_local(address):
        how = "make them with `python -m seqpar keygen`"
        raise ValueError(f"{name}: {address} is not on this machine, so it needs keys: {how}")
