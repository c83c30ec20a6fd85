"""Loopback addresses without keys: the kernel says which user is at the other end.

A client holds the server's port, and a server asks which user makes each call. Both need
Linux.
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

# Messages of NETLINK_SOCK_DIAG, which Python has no names for (man 7 sock_diag).
_SOCK_DIAG = 4  # the netlink protocol
_BY_FAMILY = 20  # the type of a request and of its answer
_IS_REQUEST = 1
_ESTABLISHED = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_QUERY = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_PORTS = struct.Struct("!HH")  # of the socket and of its peer; two addresses of 16 bytes follow
_REST = struct.Struct("=III")  # interface, and the socket's cookie: any
_STATE = struct.Struct("=xB")  # of the answer; family before it
_OWNER = struct.Struct("=II")  # the user id and the inode at the answer's end
_OWNER_OFFSET = 64
_ANY = 0xFFFFFFFF


def hold_port(address: str) -> socket.socket:
    """Return a socket that keeps other users from listening at a loopback address while it is open.

    It does not listen itself. Linux lets several sockets have one address only if all of them set
    SO_REUSEPORT and belong to one user. So the process that listens there now, or begins to later,
    is this user's. A server must set SO_REUSEPORT, as gRPC's do unless they are told otherwise.

    Raises:
        OSError: a socket of another user, or one without SO_REUSEPORT, has the address.
    """
    host, port = host_and_port(address)
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Never with SO_REUSEADDR: that lets other users listen there too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        taken = "another user or another program has this port"
        raise OSError(f"{taken}: {_WAY_OUT}") from None
    return held


def sole_server(address: str) -> socket.socket:
    """Return a socket that keeps this user's other servers from a loopback address while open.

    `address` has the port that is bound. Because its sockets set SO_REUSEPORT, a second server
    could bind it too, and would get half of the connections.

    Raises:
        OSError: another server has the address, or the kernel does not tell who connects.
    """
    host, port = host_and_port(address)
    sole = socket.socket(socket.AF_UNIX)
    try:
        sole.bind(f"\0seqpar {host} {port}")  # an abstract name, which ends with the process
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

    Do not keep the answer: another user's process may connect from a client's port later.

    Args:
        peer: what gRPC's context.peer() returns, such as "ipv4:127.0.0.1:45678".
        address: the server's address, with the port that is bound.
    """
    found = re.fullmatch(r"ipv[46]:(\[[0-9a-fA-F:.]+\]|[\d.]+):(\d+)", unquote(peer))
    if found is None:
        return None
    client, server = host_and_port(f"{found[1]}:{found[2]}"), host_and_port(address)
    try:
        return _user_of_socket(client, server)
    except (OSError, struct.error):  # of a port that is too large
        return None


def _user_of_socket(own: tuple[str, int], other: tuple[str, int]) -> int | None:
    """Return the user of the socket with these ends, if it is connected and a process has it."""
    family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
    ends = [socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (own, other)]
    body = _QUERY.pack(family, socket.IPPROTO_TCP, 0, _ANY) + _PORTS.pack(own[1], other[1])
    body += b"".join(ends) + _REST.pack(0, _ANY, _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.sendall(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _IS_REQUEST, 1, 0) + body)
        answer = kernel.recv(8192, socket.MSG_DONTWAIT)  # it has come already
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None  # an error: there is no such socket
    answer = answer[_HEADER.size :]
    user, inode = _OWNER.unpack_from(answer, _OWNER_OFFSET)
    # If no such socket is connected, the kernel answers with one that listens at `own`. A socket
    # that its process has closed has no inode, and seems to be root's.
    connected = _STATE.unpack_from(answer)[0] == _ESTABLISHED
    return int(user) if connected and inode else None
