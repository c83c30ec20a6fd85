"""The addresses of a pool's servers, which come from a list, from files and from DNS."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Sequence

from seqpar.core.arguments import shown
from seqpar.core.file_owners import read_file
from seqpar.servers.transport.addresses import check_peer, is_local

_INTERVAL_SECONDS = 2.0
_log = logging.getLogger("seqpar")


def parse(addresses: object) -> list[str]:
    """Return the argument `addresses` as a list, or raise a ValueError if an address is
    malformed.
    """
    if isinstance(addresses, str):
        addresses = [addresses]
    if not isinstance(addresses, Sequence) or not addresses:
        expected = "an address such as tcp://HOST:PORT, or a list of addresses"
        raise ValueError(f"addresses must be {expected}, got {shown(addresses)}")
    for i, address in enumerate(addresses):
        if not isinstance(address, str) or not _is_looked_up(address):
            check_peer(f"addresses[{i}]", address)
        elif address.startswith("file://"):
            try:
                _read(address)
            except OSError:
                pass  # the file can be made later
            except ValueError as error:
                raise ValueError(f"addresses[{i}]: {error}") from None
    return list(addresses)


def _is_looked_up(address: str) -> bool:
    if re.match(r"file:///.", address):
        return True
    name = re.fullmatch(r"dns://[\w.-]+:(\d{1,5})", address)
    return name is not None and 0 < int(name[1]) < 2**16


def _read(address: str) -> bytes:
    try:
        return read_file(address.removeprefix("file://"))
    except ValueError as error:
        raise ValueError(
            f"a different user could have written this list of servers: {error}"
        ) from None


def expand(addresses: Sequence[str]) -> list[str]:
    """Return the addresses of servers without duplicates. Files with addresses are read, and names
    are resolved by DNS.

    Raises:
        OSError: a file cannot be read, or DNS does not know a name.
        ValueError: another user could change a file, or a line of a file is not an address.
    """
    servers: list[str] = []
    for address in addresses:
        if address.startswith("file://"):
            servers += [check_peer("addresses", line) for line in _read(address).decode().split()]
        elif address.startswith("dns://"):
            host, port = address.removeprefix("dns://").rsplit(":", 1)
            infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            hosts = sorted({str(info[4][0]) for info in infos})
            servers += [f"tcp://[{x}]:{port}" if ":" in x else f"tcp://{x}:{port}" for x in hosts]
        else:
            servers.append(address)
    return list(dict.fromkeys(servers))


class Discovery(threading.Thread):
    """A thread that looks up the addresses every 2 s, and calls `on_change` after a change."""

    def __init__(
        self, addresses: Sequence[str], has_keys: bool, on_change: Callable[[Sequence[str]], None]
    ) -> None:
        super().__init__(name="seqpar-discovery", daemon=True)
        self._addresses, self._has_keys, self._on_change = addresses, has_keys, on_change
        self._last: list[str] | None = None
        self._fault = ""  # why the last lookup failed
        self._ended = threading.Event()
        self.look()

    def look(self) -> None:
        """Look up the addresses once.

        If the look-up fails, the pool keeps its servers. The reason is logged, unless the last
        look-up failed for the same reason.
        """
        try:
            servers = expand(self._addresses)
        except (OSError, ValueError) as error:
            if str(error) != self._fault:
                _log.warning("addresses: %s (the pool keeps the servers that it has)", error)
            self._fault = str(error)
            return
        self._fault = ""
        if not self._has_keys:
            # Without keys, payloads must not leave this machine, so addresses of other machines are
            # ignored.
            servers = [address for address in servers if is_local(address)]
        if servers != self._last:
            self._last = servers
            self._on_change(servers)

    def run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self.look()

    def end(self) -> None:
        self._ended.set()
