"""Make this process's ends of the transports that are meant."""

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

_BLOCK = 2**30  # bytes of memory for peers' one-sided writes, of which pages are used on demand


def own_name() -> str:
    """Return a name that no other process, and no other pool or server of this one, has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(16)}"


def transports_of(names: Sequence[str] | None) -> list[TransportName]:
    """Return the transports that are meant, "zmq" at the end; a ValueError names what is wrong.

    None means all that are installed.
    """
    if names is None:
        return ["nixl", "zmq"] if available() else ["zmq"]
    known = get_args(TransportName)
    if isinstance(names, str) or not set(names) <= set(known):
        raise ValueError(f"transports must be some of {list(known)}, got {shown(names)}")
    if "nixl" in names and not available():
        raise ValueError("transports: nixl is not installed, or cannot be loaded")
    found: list[TransportName] = [name for name in known if name in names and name != "zmq"]
    return [*found, "zmq"]


def open_transports(names: Sequence[TransportName], own: str) -> dict[TransportName, Transport]:
    """Return the ends of these transports, the preferred one first; `own` names this process."""
    ends: dict[TransportName, Transport] = {}
    for name in names:
        ends[name] = OneSided(f"seqpar-{own}", _BLOCK) if name == "nixl" else Frames()
    return ends
