"""Checks the argument `transports`, and makes names of pools and servers."""

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
    """Return a new name, which no other pool or server in any process has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(16)}"


def transports_of(names: Sequence[str] | None) -> list[TransportName]:
    """Check the argument `transports`, and return the names, with "grpc" as the last name.

    None means only "grpc". NIXL is used only if it is named, because its library opens a TCP port
    without authentication, even in a process that uses only Unix sockets itself.
    """
    if names is None:
        return ["grpc"]
    known = get_args(TransportName)
    if not isinstance(names, list | tuple | set) or not all(name in known for name in names):
        raise ValueError(f"transports must be some of {list(known)}, got {shown(names)}")
    if "nixl" in names and not available():
        raise ValueError("transports: nixl is not installed, or cannot be loaded")
    return ["nixl", "grpc"] if "nixl" in names else ["grpc"]
