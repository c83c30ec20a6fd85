"""Where servers are found: addresses, files of addresses, and names with many addresses."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from seqpar.core.arguments import shown
from seqpar.servers.transport.addresses import check_peer, is_local

_INTERVAL = 2.0  # seconds


def parse(addresses: object) -> list[str]:
    """Return what was given as a list, or raise a ValueError that names `addresses`."""
    if isinstance(addresses, str):
        addresses = [addresses]
    if not isinstance(addresses, Sequence) or not addresses:
        raise ValueError(f"addresses must be one or more of them, got {shown(addresses)}")
    for i, address in enumerate(addresses):
        if not isinstance(address, str) or not re.match(r"(file:///.|dns://[\w.-]+:\d+$)", address):
            check_peer(f"addresses[{i}]", address)
    return list(addresses)


def expand(addresses: Sequence[str]) -> list[str] | None:
    """Return the servers' addresses now, each once, or None if they cannot be said."""
    found: list[str] = []
    try:
        for address in addresses:
            if address.startswith("file://"):
                lines = Path(address.removeprefix("file://")).read_text().split()
                found += [check_peer("addresses", line) for line in lines]
            elif address.startswith("dns://"):
                host, port = address.removeprefix("dns://").rsplit(":", 1)
                infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
                hosts = sorted({str(info[4][0]) for info in infos})
                found += [f"tcp://[{x}]:{port}" if ":" in x else f"tcp://{x}:{port}" for x in hosts]
            else:
                found.append(address)
    except (OSError, ValueError):
        return None
    return list(dict.fromkeys(found))


class Discovery(threading.Thread):
    """Looks again and again where servers are, and says so when that has changed."""

    def __init__(
        self, addresses: Sequence[str], has_keys: bool, say: Callable[[Sequence[str]], None]
    ) -> None:
        super().__init__(name="seqpar-discovery", daemon=True)
        self._addresses, self._has_keys, self._say = addresses, has_keys, say
        self._last: list[str] | None = None
        self._ended = threading.Event()
        self.look()

    def look(self) -> None:
        """Look once; without keys, addresses that leave this machine are left out."""
        found = expand(self._addresses)
        if found is not None and not self._has_keys:
            found = [address for address in found if is_local(address)]
        if found is not None and found != self._last:
            self._last = found
            self._say(found)

    def run(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self.look()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
