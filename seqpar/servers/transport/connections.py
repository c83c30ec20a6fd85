"""The open connections of a server's socket, which the server ends itself.

ZeroMQ's heartbeats would end silent connections too. But libzmq 4.3.5 aborts the process when a
heartbeat is due on a connection whose client has left and whose last message did not fit into the
socket's queue (`Assertion failed: !_io_error`, zeromq/libzmq issues 4364 and 4841). Any client
could cause that, so heartbeats are off.

ZeroMQ also holds a message until its last frame has arrived, however many frames it has. Only the
system's counter of received bytes shows how much memory such a message takes.

ZeroMQ reads all connections in turn, and takes what a connection's receive buffer holds. A key that
sends over many connections would get most of the bandwidth. Its connections therefore share the
bytes of one buffer, and the system lets their senders wait.
"""

from __future__ import annotations

import math
import os
import resource
import socket as system
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address

import zmq
from zmq.utils.monitor import parse_monitor_message

from seqpar.servers.transport.peers import Peer
from seqpar.servers.transport.sockets import Socket
from seqpar.servers.wire.limits import PIECE_BYTES, Limits

_SO_COOKIE = 57  # Linux: a number that no other socket has had since the machine started
_BYTES_RECEIVED = slice(128, 136)  # of Linux's tcp_info
_UNIX_BYTES_PER_SECOND = 2**26  # Unix sockets have no such counter, and are never slower than this
_MAX_PAUSE_SECONDS = 1.0  # between two looks; during a longer pause the server read nothing
_COUNT_SECONDS = 0.2  # between two looks at the bytes of a connection
_SO_BUF_LOCK = 72  # Linux: 0 lets the system choose the sizes of a socket's buffers again
_MAX_SENDING = 2  # connections of a key that may send payloads with buffers of any size
_SENDING_BYTES = 2**13  # a connection sends payloads if more arrives between two looks
_SENDING_SECONDS = 2.0  # since a connection last sent payloads
_SHARED_BUFFER_BYTES = 2**17  # of all connections of a key that send payloads
_USUAL_BUFFER_BYTES = 2**16  # before the system enlarges it
_MAX_SEGMENT_BYTES = 1448  # as on Ethernet
_MIN_SEGMENTS = 4  # that fit into a small receive buffer
_ADVERTISED_SEGMENT = slice(84, 88)  # of Linux's tcp_info
_UNREAD_SLACK_BYTES = 2**24  # header, framing, and the system's own buffers for a message
_MAX_EVENTS_SECONDS = 0.02
_EVENTS = zmq.Event.LISTENING | zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
_MAX_DESCRIPTORS_USED = 0.75  # of those that the process may have
# A client needs two. One message of each connection is read before a second one of any, so
# additional connections would delay other clients' signs of life.
_MAX_CONNECTIONS_PER_LEASE = 8


@dataclass(eq=False)
class _Connection:
    descriptor: int  # the number of the server's end
    cookie: bytes  # identifies the socket that had this number when the connection was accepted
    patience: float  # seconds without a message after which it is ended
    counted: bool  # whether the system counts the bytes that it receives
    heard: float  # when its last message was read, or enough of one had arrived
    received: int = 0  # bytes that had been received when progress was last judged
    # Bytes that had been received when the last message was read; None if not looked up yet.
    first_unread: int | None = 0
    unread: int = 0  # bytes received since then
    looked: float = 0.0  # when bytes were last counted
    received_then: int = 0  # bytes that had been received at that time
    sending: float = -math.inf  # when it was last seen to receive more than 8 KiB between two looks
    buffer: int = 0  # bytes of its receive buffer, or 0 if the system chooses them
    peer: Peer | None = None  # its route and key, once a message was read
    uncredited: int = 0  # how many more payloads it has sent without credit than, later, with it
    ended: bool = False  # whether the server has ended it


class Connections:
    """The open connections of a bound socket, each of which must keep sending messages.

    The server ends a connection

    * that sends neither a message nor 1 MiB of a long one within `idle` seconds, or 8 KiB if the
      server has given it a small receive buffer;
    * whose unfinished message is longer than a request may be;
    * that holds the most unfinished bytes of its key, while unfinished messages of all connections
      take more than `queued_bytes` and those of its key more than those of any other key;
    * that is the most silent one of the key with the most connections, while there are more than
      eight per lease or while three quarters of the process's descriptors are in use.

    If several keys have connections, and one of them sends over more than two connections, it gets
    small receive buffers: 128 KiB for all that send, but at least four segments for each of them.

    Unix sockets do not count bytes, so only the first and the last rule apply to them.
    """

    def __init__(self, socket: Socket, idle: float, limits: Limits) -> None:
        self._idle, self._limits = idle, limits
        self._by_descriptor: dict[int, _Connection] = {}
        self._by_route: dict[bytes, _Connection] = {}
        self._buffers: dict[str | None, int] = {}  # of each connection, by key
        self._looked = time.monotonic()
        self._socket = socket
        # A look at a socket needs a descriptor, which a flood of connections must not take away.
        self._nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._reserved = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        address = f"inproc://events-{id(self)}"
        socket.monitor(address, _EVENTS)
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
            self._resize(connection)
        connection.heard = time.monotonic()
        connection.first_unread, connection.unread = None, 0

    def forgive_uncredited(self, route: bytes) -> None:
        if (connection := self._by_route.get(route)) is not None:
            connection.uncredited = max(0, connection.uncredited - 1)

    def count_uncredited(self, route: bytes) -> int:
        """Count a payload without credit; return the connection's count."""
        connection = self._by_route.get(route)
        if connection is None:
            return 0
        connection.uncredited += 1
        return connection.uncredited

    def number_of(self, key: str) -> int:
        return len(self._open_by_key()[key])

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
                self._count(connection, now)
            overlong = connection.unread > self._limits.bytes + _UNREAD_SLACK_BYTES
            silent = now - connection.heard > connection.patience
            if overlong or (silent and not self._advances(connection)):
                self._end(connection)
        self._end_largest()
        self._end_excess()
        self._divide_buffers(now)

    def close(self) -> None:
        """Stop following the socket's connections, before it is closed."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
        os.close(self._nowhere)
        os.close(self._reserved)

    def _count(self, connection: _Connection, now: float) -> None:
        connection.looked = now
        received = self._received(connection)
        if received is None:
            return
        if received - connection.received_then > _SENDING_BYTES:
            connection.sending = now
        connection.received_then = received
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
        least = _SENDING_BYTES if connection.buffer else PIECE_BYTES  # small buffers are slow
        advances = received - connection.received >= least
        connection.received, connection.heard = received, time.monotonic()
        return advances

    def _divide_buffers(self, now: float) -> None:
        """Set the receive buffers of keys that send over many connections while others are open."""
        if not _can_release_buffers():
            return
        by_key = self._open_by_key()
        self._buffers = {}
        for key, connections in by_key.items():
            sending = sum(now - each.sending < _SENDING_SECONDS for each in connections)
            if sending > _MAX_SENDING and any(other for other in by_key if other != key):
                self._buffers[key] = _SHARED_BUFFER_BYTES // sending
        for connections in by_key.values():
            for connection in connections:
                self._resize(connection)

    def _resize(self, connection: _Connection) -> None:
        """Give a connection the receive buffer of its key, unless it has about that size."""
        size = self._buffers.get(_key_of(connection), 0)
        if connection.counted and not size <= connection.buffer <= 2 * size:
            connection.buffer = size
            with suppress(OSError), self._socket_of(connection.descriptor) as socket:
                if _cookie(socket) != connection.cookie:
                    return  # the client has left, and another socket has the number
                # A sender whose segments do not fit would wait for a timer, of 200 ms and more.
                least = _MIN_SEGMENTS * _number(_tcp_info(socket)[_ADVERTISED_SEGMENT])
                size = max(size, least) if size else _USUAL_BUFFER_BYTES
                socket.setsockopt(system.SOL_SOCKET, system.SO_RCVBUF, size)
                if not connection.buffer:
                    socket.setsockopt(system.SOL_SOCKET, _SO_BUF_LOCK, 0)

    def _open_by_key(self) -> dict[str | None, list[_Connection]]:
        """Return the open connections; those that have not sent a message count as one key's."""
        by_key: dict[str | None, list[_Connection]] = defaultdict(list)
        for connection in self._by_descriptor.values():
            if not connection.ended:
                by_key[_key_of(connection)].append(connection)
        return by_key

    def _end_largest(self) -> None:
        """End unfinished messages until all together fit into the bytes of waiting requests.

        A key's connections are taken together, so that one key's many do not end another key's one.
        """
        by_key = self._open_by_key()
        unread = {key: sum(x.unread for x in each) for key, each in by_key.items()}
        while sum(unread.values()) > self._limits.queued_bytes:
            key = max(unread, key=lambda each: unread[each])
            largest = max(by_key[key], key=lambda each: each.unread)
            by_key[key].remove(largest)
            unread[key] -= largest.unread
            self._end(largest)

    def _end_excess(self) -> None:
        """While there are too many, end the most silent one of the key that has most."""
        most = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * _MAX_DESCRIPTORS_USED)
        most = min(most, _MAX_CONNECTIONS_PER_LEASE * self._limits.clients)
        by_key = self._open_by_key()
        excess = sum(map(len, by_key.values())) - most
        if excess <= 0:
            return
        for connections in by_key.values():
            connections.sort(key=lambda each: each.heard, reverse=True)
        for _ in range(excess):
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
            if event["event"] == zmq.Event.LISTENING:
                self._shorten_segments(descriptor)
                continue
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

    def _shorten_segments(self, listener: int) -> None:
        """Limit the segments of clients at a loopback address, for small receive buffers."""
        with suppress(OSError), self._socket_of(listener) as socket:
            if socket.family != system.AF_UNIX and ip_address(socket.getsockname()[0]).is_loopback:
                socket.setsockopt(system.IPPROTO_TCP, system.TCP_MAXSEG, _MAX_SEGMENT_BYTES)

    def _received(self, connection: _Connection) -> int | None:
        """Return how many bytes a connection has received, or None if it is being closed."""
        try:
            with self._socket_of(connection.descriptor) as socket:
                return _number(_tcp_info(socket)[_BYTES_RECEIVED])
        except OSError:
            return None

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


def _key_of(connection: _Connection) -> str | None:
    return None if connection.peer is None else connection.peer.key


@cache
def _can_release_buffers() -> bool:
    """Return whether the system can choose a buffer's size again: Linux from 5.14 on."""
    with system.socket() as socket, suppress(OSError):
        socket.setsockopt(system.SOL_SOCKET, _SO_BUF_LOCK, 0)
        return True
    return False


def _tcp_info(socket: system.socket) -> bytes:
    return socket.getsockopt(system.IPPROTO_TCP, system.TCP_INFO, _BYTES_RECEIVED.stop)


def _number(data: bytes) -> int:
    return int.from_bytes(data, sys.byteorder)


def _cookie(socket: system.socket) -> bytes:
    return socket.getsockopt(system.SOL_SOCKET, _SO_COOKIE, struct.calcsize("Q"))
