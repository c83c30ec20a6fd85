"""The names of transports, and of pools."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import get_args

from seqpar.core.arguments import shown
from seqpar.servers.transport.one_sided import available
from seqpar.servers.wire.messages import TransportName


def own_name() -> str:
    """Return a name that is unique among all pools and servers of all processes."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(16)}"


def transports_of(names: Sequence[str] | None) -> list[TransportName]:
    """Check an argument `transports`; return the names, "grpc" last. None means only "grpc".

    NIXL must be asked for: its library opens a TCP port without authentication, also in a process
    whose own sockets are Unix sockets.
    """
    if names is None:
        return ["grpc"]
    known = get_args(TransportName)
    if not isinstance(names, list | tuple | set) or not all(name in known for name in names):
        raise ValueError(f"transports must be some of {list(known)}, got {shown(names)}")
    if "nixl" in names and not available():
        raise ValueError("transports: nixl is not installed, or cannot be loaded")
    return ["nixl", "grpc"] if "nixl" in names else ["grpc"]
