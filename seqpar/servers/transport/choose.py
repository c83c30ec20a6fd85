"""The check of the argument `transports`, and unique names of pools and servers."""

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
    """Check the argument `transports`, and return the names of the transports, with "grpc" last.

    None means only "grpc". NIXL is not a default, because its library opens a TCP port without
    authentication, even if the process otherwise uses only Unix sockets.
    """
    if names is None:
        return ["grpc"]
    known = get_args(TransportName)
    if not isinstance(names, list | tuple | set) or not all(name in known for name in names):
        raise ValueError(f"transports must be some of {list(known)}, got {shown(names)}")
    if "nixl" in names and not available():
        way_out = "pip install 'seqpar[nixl]'"
        raise ValueError(f"transports: nixl is not installed, or cannot be loaded: {way_out}")
    return ["nixl", "grpc"] if "nixl" in names else ["grpc"]
