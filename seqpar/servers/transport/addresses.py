"""The addresses of servers, ipc://PATH and tcp://HOST:PORT, and gRPC's names for them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from urllib.parse import quote

from seqpar.core.arguments import shown


def check_address(name: str, address: object) -> str:
    """Return `address` if it is ipc://PATH or tcp://HOST:PORT, or raise a ValueError.

    `name` is the argument from which the address comes; the error names this argument.
    """
    if isinstance(address, str) and "\0" not in address:
        if address.startswith("ipc:///") and 7 < len(address.encode()) <= 6 + 107:
            if _is_in_root(path_of(address)):
                raise ValueError(
                    f"{name} must be in a folder below /, got {address}: is a variable such as "
                    "$XDG_RUNTIME_DIR not set? Use a folder that only you may write to"
                )
            return address
        match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[\w.*-]+):(\d+|\*)", address)
        if match and (match[2] == "*" or int(match[2]) < 2**16):
            return address
    expected = "ipc:///FOLDER/NAME (a path of at most 107 bytes) or tcp://HOST:PORT"
    raise ValueError(f"{name} must be {expected}, got {shown(address)}")


def _is_in_root(path: str) -> bool:
    return "/" not in os.path.normpath(path).strip("/")


def check_peer(name: str, address: object) -> str:
    """Return `address` if a client can connect to it, or raise a ValueError that names `name`."""
    checked = check_address(name, address)
    host, _, port = checked.removeprefix("tcp://").rpartition(":")
    if not is_own(checked) and ("*" in host or not port.isdecimal() or not int(port)):
        raise ValueError(f"{name} must name the host and port of a server, got {checked}")
    return checked


def is_local(address: str) -> bool:
    """Return whether an address is on this machine: a Unix socket or a loopback address."""
    if is_own(address):
        return True
    try:
        return ipaddress.ip_address(host_and_port(address)[0]).is_loopback
    except ValueError:
        return False


def is_own(address: str) -> bool:
    """Return whether an address is a Unix socket, which only processes of this user can use."""
    return str(address).startswith("ipc:")


def path_of(address: str) -> str:
    return address.removeprefix("ipc://")


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port of a TCP address. The port "*" is returned as 0.

    An IPv4 address that is written as an IPv6 address is returned as the IPv4 address. The name
    localhost always stands for 127.0.0.1, whatever the system's configuration says, so that clients
    and servers use the same address.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    with contextlib.suppress(ValueError):  # raised if the host is a name
        host = str(getattr(ipaddress.ip_address(host), "ipv4_mapped", None) or host)
    return host, 0 if port == "*" else int(port)


def bind_target(address: str) -> str:
    """Return gRPC's name for an address at which a server binds a port."""
    if is_own(address):
        return f"unix:{quote(path_of(address))}"  # gRPC decodes the quoted path
    host, port = host_and_port(address)
    host = "::" if host == "*" else host  # at this address, gRPC also accepts IPv4
    return joined(host, port)


def joined(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def target(address: str) -> str:
    """Return gRPC's name for a TCP address to which a client connects.

    For a Unix socket, use `PinnedSocket.target` instead.
    """
    return f"dns:///{bind_target(address)}"  # gRPC does not look up an IP address in DNS


def bound(address: str, port: int) -> str:
    """Return an address in which the port is the one that gRPC has bound. A Unix socket has no
    port.
    """
    return address if is_own(address) else f"{address.rpartition(':')[0]}:{port}"


def check_keys(name: str, address: str, keys: object) -> None:
    """Raise a ValueError if `keys` is None and the address is not known to be on this machine."""
    if keys is None and not is_local(address):
        how = "make them with `python -m seqpar keygen`"
        raise ValueError(f"{name}: {address} is not on this machine, so it needs keys: {how}")
