"""Make what a pool consists of; this needs the packages of the extra `serve`."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from seqpar.arguments import shown
from seqpar.servers.addresses import check_keys
from seqpar.servers.discovery import Discovery, parse
from seqpar.servers.dispatcher import Dispatcher
from seqpar.servers.hedging import Hedging
from seqpar.servers.keys import client_keys
from seqpar.servers.leases import library_version
from seqpar.servers.limits import Deadlines
from seqpar.servers.one_sided import OneSided, available
from seqpar.servers.protocol import TransportName
from seqpar.servers.transport import Frames, Transport

_BLOCK = 2**28  # bytes of memory for one-sided writes, in and out each


def connect(
    addresses: str | Sequence[str],
    folder: Path | None,
    transports: Sequence[str] | None,
    deadlines: Deadlines,
    quantile: float,
    depth: int,
    home: bool,
) -> Dispatcher:
    """Return a running dispatcher; the arguments are those of `ServerPool.connect`."""
    places, names = parse(addresses), transports_of(transports)
    keys = None if folder is None else client_keys(folder)
    for i, place in enumerate(places):
        if not place.startswith("file://"):
            check_keys(f"addresses[{i}]", place.replace("dns://", "tcp://"), keys)
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    ends: dict[TransportName, Transport] = {}
    for each in names:
        ends[each] = OneSided(f"seqpar-{name}", _BLOCK, _BLOCK) if each == "nixl" else Frames()
    client, writes_afar = (library_version(), name), transports is not None
    hedging = Hedging(quantile)
    dispatcher = Dispatcher(keys, ends, client, deadlines, hedging, depth, home, writes_afar)
    discovery = Discovery(places, dispatcher.serve_at)
    dispatcher.discovery = discovery
    dispatcher.start()
    if any(place.startswith(("file://", "dns://")) for place in places):
        discovery.start()
    dispatcher.wait_for_any(deadlines.connect)
    return dispatcher


def transports_of(names: Sequence[str] | None) -> list[TransportName]:
    """Return the transports that are meant, "zmq" at the end; a ValueError names what is wrong."""
    if names is None:
        return ["nixl", "zmq"] if available() else ["zmq"]
    known = get_args(TransportName)
    if isinstance(names, str) or not set(names) <= set(known):
        raise ValueError(f"transports must be some of {list(known)}, got {shown(names)}")
    if "nixl" in names and not available():
        raise ValueError("transports: nixl is not installed, or cannot be loaded")
    found: list[TransportName] = [name for name in known if name in names and name != "zmq"]
    return [*found, "zmq"]
