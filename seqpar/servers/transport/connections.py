"""The open connections of a server's socket, which the server ends itself.

ZeroMQ's heartbeats would end silent connections too. But libzmq 4.3.5 aborts the process when a
heartbeat is due on a connection whose client has left and whose last message did not fit into the
socket's queue (`Assertion failed: !_io_error`, zeromq/libzmq issues 4364 and 4841). Any client
could cause that, so heartbeats are off.

ZeroMQ also holds a message until its last frame has arrived, however many frames it has. Only the
system's counter of received bytes shows how much memory such a message takes.
"""

from __future__ import annotations

import os
import resource
import socket as system
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from seqpar.servers.transport.peers import Peer
from seqpar.servers.transport.sockets import Socket
from seqpar.servers.wire.limits import PIECE_BYTES, Limits

_SO_COOKIE = 57  # Linux: a number that no other socket has had since the machine started
_BYTES_RECEIVED = slice(128, 136)  # of Linux's tcp_info
_UNIX_BYTES_PER_SECOND = 2**26  # Unix sockets have no such counter, and are never slower than this
_MAX_PAUSE_SECONDS = 1.0  # between two looks; during a longer pause the server read nothing
_COUNT_SECONDS = 1.0  # between two looks at the bytes of a connection
_UNREAD_SLACK_BYTES = 2**24  # header, framing, and the system's own buffers for a message
_MAX_EVENTS_SECONDS = 0.02
_MAX_DESCRIPTORS_USED = 0.75  # of those that the process may have
# A client needs two. One message of each connection is read before a second one of any, so
# additional connections would delay other clients' signs of life.
_MAX_CONNECTIONS_PER_LEASE = 8


@dataclass(eq=False)
class _Connection:
    """An open connection.

    Attributes:
        descriptor: the number of the server's end.
        cookie: identifies the socket that had this number when the connection was accepted.
        patience: seconds without a message after which it is ended.
        counted: whether the system counts the bytes that it receives.
        heard: when its last message was read, or enough of one had arrived.
        received: bytes that had been received when progress was last judged.
        first_unread: bytes that had been received when the last message was read, or None if that
            has not been looked up.
        unread: bytes received since then.
        looked: when bytes were last counted.
        peer: its route and key, once a message was read.
        ended: whether the server has ended it.
    """

    descriptor: int
    cookie: bytes
    patience: float
    counted: bool
    heard: float
    received: int = 0
    first_unread: int | None = 0
    unread: int = 0
    looked: float = 0.0
    peer: Peer | None = None
    ended: bool = False


class Connections:
    """The open connections of a bound socket, each of which must keep sending messages.

    The server ends a connection

    * that sends neither a message nor 1 MiB of a long one within `idle` seconds;
    * whose unfinished message is longer than a request may be;
    * that holds the most unfinished bytes of its key, while unfinished messages of all connections
      take more than `queued_bytes` and those of its key more than those of any other key;
    * that is the most silent one of the key with the most connections, while there are more than
      eight per lease or while three quarters of the process's descriptors are in use.

    Unix sockets do not count bytes, so only the first and the last rule apply to them.
    """

    def __init__(self, socket: Socket, idle: float, limits: Limits) -> None:
        self._idle, self._limits = idle, limits
        self._by_descriptor: dict[int, _Connection] = {}
        self._by_route: dict[bytes, _Connection] = {}
        self._looked = time.monotonic()
        self._socket = socket
        # A look at a socket needs a descriptor, which a flood of connections must not take away.
        self._nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._reserved = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        address = f"inproc://events-{id(self)}"
        socket.monitor(address, zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # ZeroMQ's thread would wait for this one, and close would hang
        self._events.connect(address)

    def heard(self, peer: Peer, frame: zmq.Frame) -> None:
        """Note that a message was read from a connection; `frame` is one of its frames."""
        connection = self._by_route.get(peer.route)
        if connection is None:
            self._read_events()
            try:
                descriptor = int(frame.get(zmq.SRCFD))
            except zmq.ZMQError:
                return  # the peer uses an older protocol: its connection counts as silent
            connection = self._by_descriptor.get(descriptor)
            if connection is None:
                return  # the client has left
            connection.peer = peer
            self._by_route[peer.route] = connection
        connection.heard = time.monotonic()
        connection.first_unread, connection.unread = None, 0

    def ended(self, route: bytes) -> bool:
        """Return whether the server has ended a connection that is still known."""
        connection = self._by_route.get(route)
        return connection is not None and connection.ended

    def end(self, route: bytes) -> None:
        """End a connection: nothing passes on it from now on."""
        if (connection := self._by_route.get(route)) is not None:
            self._end(connection)

    def look(self) -> None:
        """End connections that break one of the rules."""
        self._read_events()
        now = time.monotonic()
        pause = now - self._looked
        self._looked = now
        for connection in list(self._by_descriptor.values()):
            if pause > _MAX_PAUSE_SECONDS:
                connection.heard += pause
                connection.first_unread = None
            if connection.counted and now - connection.looked >= _COUNT_SECONDS:
                self._count_unread(connection, now)
            overlong = connection.unread > self._limits.bytes + _UNREAD_SLACK_BYTES
            silent = now - connection.heard > connection.patience
            if overlong or (silent and not self._advances(connection)):
                self._end(connection)
        self._end_largest()
        self._end_excess()

    def close(self) -> None:
        """Stop following the socket's connections, before it is closed."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
        os.close(self._nowhere)
        os.close(self._reserved)

    def _count_unread(self, connection: _Connection, now: float) -> None:
        connection.looked = now
        received = self._received(connection)
        if received is None:
            return
        if connection.first_unread is None:
            connection.first_unread = received
        connection.unread = received - connection.first_unread

    def _advances(self, connection: _Connection) -> bool:
        """Return whether enough of a long message has arrived since the last time."""
        if not connection.counted:
            return False
        received = self._received(connection)
        if received is None:
            return True  # it is being closed
        advances = received - connection.received >= PIECE_BYTES
        connection.received, connection.heard = received, time.monotonic()
        return advances

    def _end_largest(self) -> None:
        """End unfinished messages until all together fit into the bytes of waiting requests.

        A key's connections are taken together, so that one key's many do not end another key's one.
        """
        by_key: dict[str, list[_Connection]] = defaultdict(list)
        for connection in self._by_descriptor.values():
            if connection.unread and not connection.ended:
                by_key[connection.peer.key if connection.peer else ""].append(connection)
        unread = {key: sum(x.unread for x in each) for key, each in by_key.items()}
        while sum(unread.values()) > self._limits.queued_bytes:
            key = max(unread, key=lambda each: unread[each])
            largest = max(by_key[key], key=lambda each: each.unread)
            by_key[key].remove(largest)
            unread[key] -= largest.unread
            self._end(largest)

    def _end_excess(self) -> None:
        """While there are too many, end the most silent one of the key with the most connections.

        All connections that have not sent a message count as connections of one key.
        """
        most = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * _MAX_DESCRIPTORS_USED)
        most = min(most, _MAX_CONNECTIONS_PER_LEASE * self._limits.clients)
        open_connections = [x for x in self._by_descriptor.values() if not x.ended]
        if len(open_connections) <= most:
            return
        by_key: dict[str | None, list[_Connection]] = defaultdict(list)
        for connection in open_connections:
            by_key[connection.peer.key if connection.peer else None].append(connection)
        for connections in by_key.values():
            connections.sort(key=lambda each: each.heard, reverse=True)
        for _ in range(len(open_connections) - most):
            largest = max(by_key.values(), key=len)
            self._end(largest.pop())

    def _end(self, connection: _Connection) -> None:
        connection.ended = True
        self._read_events()
        if self._by_descriptor.get(connection.descriptor) is not connection:
            return  # the client has left
        try:
            with self._socket_of(connection.descriptor) as socket:
                if _cookie(socket) == connection.cookie:  # another socket may have the number now
                    socket.shutdown(system.SHUT_RDWR)
        except OSError:
            pass  # the client has left

    def _read_events(self) -> None:
        """Follow ZeroMQ's events, for a limited time: connections may come as fast as they go."""
        accepted: set[int] = set()
        end = time.monotonic() + _MAX_EVENTS_SECONDS
        while time.monotonic() < end:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
            descriptor = event["value"]
            previous = self._by_descriptor.pop(descriptor, None)
            if previous is not None and previous.peer is not None:
                self._by_route.pop(previous.peer.route, None)
            if event["event"] == zmq.Event.ACCEPTED:
                accepted.add(descriptor)
            else:
                accepted.discard(descriptor)
        for descriptor in accepted:  # looking at a socket takes longer than reading an event
            self._accept(descriptor)

    def _accept(self, descriptor: int) -> None:
        try:
            with self._socket_of(descriptor) as socket:
                cookie = _cookie(socket)
                counted = socket.family != system.AF_UNIX
        except OSError:
            return  # the client has left
        patience = self._idle
        if not counted:
            patience += self._limits.bytes / _UNIX_BYTES_PER_SECOND
        connection = _Connection(descriptor, cookie, patience, counted, time.monotonic())
        self._by_descriptor[descriptor] = connection

    def _received(self, connection: _Connection) -> int | None:
        """Return how many bytes a connection has received, or None if it is being closed."""
        try:
            with self._socket_of(connection.descriptor) as socket:
                info = socket.getsockopt(system.IPPROTO_TCP, system.TCP_INFO, _BYTES_RECEIVED.stop)
        except OSError:
            return None
        return int.from_bytes(info[_BYTES_RECEIVED], sys.byteorder)

    @contextmanager
    def _socket_of(self, descriptor: int) -> Iterator[system.socket]:
        """Open ZeroMQ's socket under the reserved descriptor, so ZeroMQ cannot close it meanwhile.

        An OSError says that the socket is closed.
        """
        os.dup2(descriptor, self._reserved, inheritable=False)
        try:
            socket = system.socket(fileno=self._reserved)
            try:
                yield socket
            finally:
                socket.detach()
        finally:
            os.dup2(self._nowhere, self._reserved, inheritable=False)


def _cookie(socket: system.socket) -> bytes:
    return socket.getsockopt(system.SOL_SOCKET, _SO_COOKIE, struct.calcsize("Q"))
