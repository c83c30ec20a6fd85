"""Chooses transports, and opens this process's end of each."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import get_args

from seqpar.core.arguments import shown
from seqpar.servers.transport.one_sided import OneSided, available
from seqpar.servers.transport.zeromq import Frames, Transport
from seqpar.servers.wire.protocol import TransportName

_ARENA_BYTES = 2**30  # for peers' one-sided writes; the system provides pages on demand


def own_name() -> str:
    """Return a name that is unique among all pools and servers of all processes."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(16)}"


def transports_of(names: Sequence[str] | None) -> list[TransportName]:
    """Check an argument `transports`; return the names, "zmq" last. None means all installed."""
    if names is None:
        return ["nixl", "zmq"] if available() else ["zmq"]
    known = get_args(TransportName)
    if isinstance(names, str) or not set(names) <= set(known):
        raise ValueError(f"transports must be some of {list(known)}, got {shown(names)}")
    if "nixl" in names and not available():
        raise ValueError("transports: nixl is not installed, or cannot be loaded")
    others: list[TransportName] = [name for name in known if name in names and name != "zmq"]
    return [*others, "zmq"]


def open_transports(names: Sequence[TransportName], own: str) -> dict[TransportName, Transport]:
    """Open this process's end of each transport; `own` is the name of this pool or server."""
    ends: dict[TransportName, Transport] = {}
    for name in names:
        ends[name] = OneSided(f"seqpar-{own}", _ARENA_BYTES) if name == "nixl" else Frames()
    return ends
