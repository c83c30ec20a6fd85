"""The check of an address before a client connects, so that no other user can act as the server."""

from __future__ import annotations

from socket import socket

from seqpar.servers.transport.addresses import check_keys, is_own, path_of, target
from seqpar.servers.transport.loopback import hold_port
from seqpar.servers.transport.unix_sockets import PinnedSocket

# The options of each channel to a route. The first option ignores proxies from environment
# variables, which would receive all payloads. The second one prevents that a channel uses a
# connection to an earlier server.
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


class Route:
    """A checked address. While a route is open, a channel to `target` reaches a trusted process.

    A process at a Unix socket is trusted if it belongs to this user or root. Without keys, a
    process at a loopback address is trusted if it belongs to this user. With keys, TLS checks the
    server's certificate. After the connection to the server was lost, make a new route and a new
    channel.
    """

    def __init__(self, address: str, has_keys: bool) -> None:
        """Check an address. Nothing is sent.

        Raises:
            OSError: nobody listens at the Unix socket, or other users could listen at the address.
            ValueError: the address may be on a different machine, and there are no keys.
        """
        self._held: PinnedSocket | socket | None = None
        if is_own(address):
            self._held = pinned = PinnedSocket(path_of(address))
            self.target = pinned.target
            return
        self.target = target(address)
        if not has_keys:
            check_keys("address", address, None)
            self._held = hold_port(address)

    def close(self) -> None:
        """Free the address. Close all channels to the route first."""
        if self._held is not None:
            self._held.close()
