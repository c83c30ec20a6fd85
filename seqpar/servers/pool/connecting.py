"""Make what a pool consists of; this needs the packages of the extra `serve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seqpar.servers.pool.discovery import Discovery, parse
from seqpar.servers.pool.dispatcher import Dispatcher
from seqpar.servers.pool.hedging import Hedging
from seqpar.servers.pool.links import Links
from seqpar.servers.server.leases import library_version
from seqpar.servers.transport.addresses import check_keys
from seqpar.servers.transport.choose import make_ends, own_name, transports_of
from seqpar.servers.transport.curve_keys import client_keys
from seqpar.servers.wire.limits import Deadlines


def connect(
    addresses: str | Sequence[str],
    folder: Path | None,
    transports: Sequence[str] | None,
    deadlines: Deadlines,
    quantile: float,
    depth: int,
    home_depth: int,
    sample: int,
) -> tuple[Dispatcher, Discovery]:
    """Return what runs a pool, and what looks where servers are, both running.

    The arguments are those of `ServerPool.connect`; `home_depth` is −1 without a home.
    """
    places, names = parse(addresses), transports_of(transports)
    keys = None if folder is None else client_keys(folder)
    for i, place in enumerate(places):
        if not place.startswith("file://"):
            check_keys(f"addresses[{i}]", place.replace("dns://", "tcp://"), keys)
    name = own_name()
    client, writes_afar = (library_version(), name), transports is not None
    links = Links(keys, make_ends(names, name), client, deadlines.connect, depth, writes_afar)
    dispatcher = Dispatcher(links, deadlines, Hedging(quantile), home_depth, sample)
    discovery = Discovery(places, keys is not None, dispatcher.serve_at)
    dispatcher.start()
    if any(place.startswith(("file://", "dns://")) for place in places):
        discovery.start()
    links.wait_for_any(deadlines.connect)
    return dispatcher, discovery
