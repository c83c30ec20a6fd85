"""Where servers are: addresses, which need keys unless they stay on this machine."""

from __future__ import annotations

import ipaddress
import re

from seqpar.arguments import shown


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


def check_keys(name: str, address: str, keys: object) -> None:
    """Raise a ValueError unless an address is local, or there are keys."""
    if keys is None and not is_local(address):
        how = "make them with `python -m seqpar keygen`"
        raise ValueError(f"{name}: {address} is not on this machine, so it needs keys: {how}")
