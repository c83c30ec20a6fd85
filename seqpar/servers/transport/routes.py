"""The way from a client to a server that no other user of the machine can take over."""

from __future__ import annotations

from socket import socket

from seqpar.servers.transport.addresses import check_keys, is_own, path_of, target
from seqpar.servers.transport.loopback import hold_port
from seqpar.servers.transport.unix_sockets import PinnedSocket

# Options of every channel to a route. A proxy of the environment would get all payloads, and
# channels that share connections could share one to an earlier server.
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


class Route:
    """A checked address. While it is open, a channel to `target` reaches only a trusted process.

    At a Unix socket or a loopback address without keys, that process is this user's (at a Unix
    socket, it may be root's). Other addresses need keys, and TLS checks the server's certificate.
    Make a new route, and a new channel, when the server was lost.
    """

    def __init__(self, address: str, has_keys: bool) -> None:
        """Check an address; nothing is sent.

        Raises:
            OSError: nobody listens at the Unix socket, or another user could listen at the address.
            ValueError: the address is on another machine, and there are no keys.
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
        """Give the address up; close the channels before."""
        if self._held is not None:
            self._held.close()
