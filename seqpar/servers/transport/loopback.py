"""Protection of loopback addresses from other users of the machine, without keys.

A client binds a second socket to the server's port, so that no other user can listen at this port.
A server asks the kernel which user makes a call. Both methods work only on Linux.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from urllib.parse import unquote

from seqpar.servers.transport.addresses import host_and_port

_WAY_OUT = "use a Unix socket (ipc://PATH) or keys"

# Constants and messages of NETLINK_SOCK_DIAG (man 7 sock_diag), which Python does not define.
_SOCK_DIAG = 4  # the netlink protocol
_BY_FAMILY = 20  # the type of a request and of its answer
_IS_REQUEST = 1
_ESTABLISHED = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_QUERY = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_PORTS = struct.Struct("!HH")  # ports of socket and peer; two addresses of 16 bytes follow
# The interface and the socket's cookie, for which any value is allowed.
_REST = struct.Struct("=III")
_STATE = struct.Struct("=xB")  # the beginning of the answer: one byte for the family, then state
_OWNER = struct.Struct("=II")  # the end of the answer: user id and inode
_OWNER_OFFSET = 64
_ANY = 0xFFFFFFFF


def hold_port(address: str) -> socket.socket:
    """Return an open socket that keeps other users from listening at a loopback address.

    The socket does not listen. Linux allows several sockets at one address only if all of them set
    SO_REUSEPORT and belong to the same user. While the returned socket is open, every process that
    listens at the address therefore belongs to this user. The server must set SO_REUSEPORT; servers
    of gRPC do so by default.

    Raises:
        OSError: a socket of a different user, or a socket without SO_REUSEPORT, has the address.
    """
    host, port = host_and_port(address)
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # SO_REUSEADDR must not be set, because other users could then listen at this address too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        taken = "another user or another program uses this port"
        raise OSError(f"{taken}: {_WAY_OUT}") from None
    return held


def sole_server(address: str) -> socket.socket:
    """Return an open socket that keeps other servers of this user from using a loopback address.

    A server's sockets set SO_REUSEPORT, so a second server of this user could bind the same port
    and would then get half of the connections. To prevent this, each server calls `sole_server`
    after it has bound the port in `address`. The call fails while the socket of an earlier call is
    open.

    Raises:
        OSError: a second server has the address, or the kernel does not tell which user connects.
    """
    host, port = host_and_port(address)
    sole = socket.socket(socket.AF_UNIX)
    try:
        # An abstract name is free again as soon as the process has ended.
        sole.bind(f"\0seqpar {host} {port}")
        if not _kernel_knows_users():
            raise OSError(f"this system does not tell which user connects: {_WAY_OUT}")
    except OSError as error:
        sole.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError("another server listens there") from None
    return sole


def _kernel_knows_users() -> bool:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        return _user_of_socket(client.getsockname(), client.getpeername()) == os.geteuid()


def user_of(peer: str, address: str) -> int | None:
    """Return the user id of a connected client, or None if the kernel knows no such connection.

    Do not keep the result, because a process of a different user can use the client's port later.

    Args:
        peer: what gRPC's context.peer() returns, such as "ipv4:127.0.0.1:45678".
        address: the server's address, with the port that was bound.
    """
    found = re.fullmatch(r"ipv[46]:(\[[0-9a-fA-F:.]+\]|[\d.]+):(\d+)", unquote(peer))
    if found is None:
        return None
    client, server = host_and_port(f"{found[1]}:{found[2]}"), host_and_port(address)
    try:
        return _user_of_socket(client, server)
    except (OSError, struct.error):  # struct.error if the port is too large
        return None


def _user_of_socket(own: tuple[str, int], other: tuple[str, int]) -> int | None:
    """Return the user id of a TCP socket, given the addresses of its two ends.

    Returns None unless the socket is connected and a process has it open.
    """
    family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
    ends = [socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (own, other)]
    body = _QUERY.pack(family, socket.IPPROTO_TCP, 0, _ANY) + _PORTS.pack(own[1], other[1])
    body += b"".join(ends) + _REST.pack(0, _ANY, _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.sendall(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _IS_REQUEST, 1, 0) + body)
        answer = kernel.recv(8192, socket.MSG_DONTWAIT)  # the kernel has answered during sendall
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None  # the answer is an error, because there is no such socket
    answer = answer[_HEADER.size :]
    user, inode = _OWNER.unpack_from(answer, _OWNER_OFFSET)
    # If there is no such connection, the kernel's answer can be about a socket that listens at
    # `own`. A socket that its process has closed has inode 0 and the user id of root.
    connected = _STATE.unpack_from(answer)[0] == _ESTABLISHED
    return int(user) if connected and inode else None
