"""Finds the servers of a pool: listed addresses, files of addresses, and DNS names."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from seqpar.core.arguments import shown
from seqpar.servers.transport.addresses import check_peer, is_local

_INTERVAL_SECONDS = 2.0


def parse(addresses: object) -> list[str]:
    """Return the argument `addresses` as a list; raise a ValueError if one is malformed."""
    if isinstance(addresses, str):
        addresses = [addresses]
    if not isinstance(addresses, Sequence) or not addresses:
        raise ValueError(f"addresses must be one or more of them, got {shown(addresses)}")
    for i, address in enumerate(addresses):
        if not isinstance(address, str) or not _is_looked_up(address):
            check_peer(f"addresses[{i}]", address)
    return list(addresses)


def _is_looked_up(address: str) -> bool:
    if re.match(r"file:///.", address):
        return True
    name = re.fullmatch(r"dns://[\w.-]+:(\d{1,5})", address)
    return name is not None and 0 < int(name[1]) < 2**16


def expand(addresses: Sequence[str]) -> list[str] | None:
    """Return the servers' current addresses without duplicates, or None if a lookup fails."""
    servers: list[str] = []
    try:
        for address in addresses:
            if address.startswith("file://"):
                lines = Path(address.removeprefix("file://")).read_text().split()
                servers += [check_peer("addresses", line) for line in lines]
            elif address.startswith("dns://"):
                host, port = address.removeprefix("dns://").rsplit(":", 1)
                infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
                hosts = sorted({str(info[4][0]) for info in infos})
                servers += [
                    f"tcp://[{x}]:{port}" if ":" in x else f"tcp://{x}:{port}" for x in hosts
                ]
            else:
                servers.append(address)
    except (OSError, ValueError):
        return None
    return list(dict.fromkeys(servers))


class Discovery(threading.Thread):
    """Looks up the servers' addresses every 2 s and reports changes."""

    def __init__(
        self, addresses: Sequence[str], has_keys: bool, on_change: Callable[[Sequence[str]], None]
    ) -> None:
        super().__init__(name="seqpar-discovery", daemon=True)
        self._addresses, self._has_keys, self._on_change = addresses, has_keys, on_change
        self._last: list[str] | None = None
        self._ended = threading.Event()
        self.look()

    def look(self) -> None:
        """Look once. A failed lookup changes nothing."""
        servers = expand(self._addresses)
        if servers is not None and not self._has_keys:
            # A file or a name must not send payloads off this machine without keys.
            servers = [address for address in servers if is_local(address)]
        if servers is not None and servers != self._last:
            self._last = servers
            self._on_change(servers)

    def run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self.look()

    def end(self) -> None:
        self._ended.set()
