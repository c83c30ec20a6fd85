"""The addresses at which this process listens, read from the tables of the Linux kernel."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from pathlib import Path

_LISTENS = "0A"  # the state of a listening TCP socket
_TABLES = Path("/proc/self/net")


def listeners() -> set[str]:
    """Return the TCP addresses (HOST:PORT) and abstract Unix sockets (unix:@NAME) of this process.

    Every user of the machine can reach an abstract Unix socket, because it has no file.
    """
    own, found = _inodes(), set()
    for row in _rows("tcp") + _rows("tcp6"):
        if row[3] == _LISTENS and row[9] in own:
            found.add(_address(row[1]))
    for row in _rows("unix"):
        if len(row) > 7 and row[7].startswith("@") and row[6] in own:
            found.add(f"unix:{row[7]}")
    return found


def _inodes() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # raised if the descriptor was closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def _rows(table: str) -> list[list[str]]:
    try:
        lines = (_TABLES / table).read_text().splitlines()
    except FileNotFoundError:  # the table tcp6 does not exist on a system without IPv6
        return []
    return [line.split() for line in lines[1:]]


def _address(text: str) -> str:
    """Convert an address of the table to HOST:PORT.

    In the table, the host is written as hexadecimal 32-bit numbers, in the machine's byte order.
    """
    host, port = text.split(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    ip = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return f"[{ip}]:{int(port, 16)}" if ip.version == 6 else f"{ip}:{int(port, 16)}"
