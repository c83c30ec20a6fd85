"""The open connections of a server's socket, which the server ends itself.

ZeroMQ's heartbeats would end silent connections too. But libzmq 4.3.5 aborts the process when a
heartbeat is due on a connection whose client has left and whose last message did not fit into the
socket's queue (`Assertion failed: !_io_error`, zeromq/libzmq issues 4364 and 4841). Any client
could do that, so heartbeats are off.
"""

from __future__ import annotations

import os
import socket as system
import struct
import sys
import time
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from seqpar.servers.transport.sockets import Socket
from seqpar.servers.wire.limits import PIECE_BYTES

_SO_COOKIE = 57  # Linux: a number that no other socket has had since the machine started
_BYTES_RECEIVED = slice(128, 136)  # of Linux's tcp_info
_UNIX_BYTES_PER_SECOND = 2**26  # Unix sockets have no such counter, and are never slower than this
_MAX_PAUSE = 1.0  # seconds between two looks; in a longer pause nothing was read


@dataclass(eq=False)
class _Connection:
    """An open connection.

    Attributes:
        descriptor: the number of the server's end.
        cookie: which socket had this number when the connection was accepted.
        patience: seconds without a message after which it is ended.
        counted: whether the bytes that it has received are known.
        heard: when its last message was read, or enough of one had arrived.
        received: bytes, when that was last looked at.
        route: the number that ZeroMQ gave it, once a message was read.
        ended: whether the server has ended it.
    """

    descriptor: int
    cookie: bytes
    patience: float
    counted: bool
    heard: float
    received: int = 0
    route: bytes = b""
    ended: bool = False


class Connections:
    """The open connections of a bound socket; one without messages is ended.

    A client needs to send a message within `idle` seconds, or 1 MiB of a long one.
    """

    def __init__(self, socket: Socket, idle: float, max_message_bytes: int) -> None:
        self._idle = idle
        self._idle_of_unix = idle + max_message_bytes / _UNIX_BYTES_PER_SECOND
        self._by_descriptor: dict[int, _Connection] = {}
        self._by_route: dict[bytes, _Connection] = {}
        self._looked = time.monotonic()
        self._socket = socket
        address = f"inproc://events-{id(self)}"
        socket.monitor(address, zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # ZeroMQ's thread would wait for this one, and close would hang
        self._events.connect(address)

    def heard(self, route: bytes, frame: zmq.Frame) -> None:
        """Note that a message of a connection was read, of which this is a frame."""
        connection = self._by_route.get(route)
        if connection is None:
            self._read_events()
            try:
                descriptor = int(frame.get(zmq.SRCFD))
            except zmq.ZMQError:
                return  # an older protocol than ours: the connection counts as silent
            connection = self._by_descriptor.get(descriptor)
            if connection is None:
                return  # the client has left
            connection.route = route
            self._by_route[route] = connection
        connection.heard = time.monotonic()

    def ended(self, route: bytes) -> bool:
        """Return whether the server has ended a connection that is still known."""
        connection = self._by_route.get(route)
        return connection is not None and connection.ended

    def end(self, route: bytes) -> None:
        """End a connection: nothing passes on it from now on."""
        if (connection := self._by_route.get(route)) is not None:
            self._end(connection)

    def look(self) -> None:
        """End connections that have been silent, or too slow, for too long."""
        self._read_events()
        now = time.monotonic()
        pause = now - self._looked
        self._looked = now
        for connection in list(self._by_descriptor.values()):
            if pause > _MAX_PAUSE:
                connection.heard += pause
            if now - connection.heard > connection.patience and not self._advances(connection):
                self._end(connection)

    def close(self) -> None:
        """Stop following the socket's connections, before it is closed."""
        self._socket.disable_monitor()
        self._events.close(linger=0)

    def _advances(self, connection: _Connection) -> bool:
        """Return whether enough of a long message has arrived since the last time."""
        if not connection.counted:
            return False
        try:
            with _socket_of(connection.descriptor) as socket:
                received = _bytes_received(socket)
        except OSError:
            return True  # it is being closed
        advances = received - connection.received >= PIECE_BYTES
        connection.received, connection.heard = received, time.monotonic()
        return advances

    def _end(self, connection: _Connection) -> None:
        connection.ended = True
        self._read_events()
        if self._by_descriptor.get(connection.descriptor) is not connection:
            return  # the client has left
        try:
            with _socket_of(connection.descriptor) as socket:
                if _cookie(socket) == connection.cookie:  # else the number is another one's by now
                    socket.shutdown(system.SHUT_RDWR)
        except OSError:
            pass  # the client has left

    def _read_events(self) -> None:
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            descriptor = event["value"]
            previous = self._by_descriptor.pop(descriptor, None)
            if previous is not None:
                self._by_route.pop(previous.route, None)
            if event["event"] == zmq.Event.ACCEPTED:
                self._accept(descriptor)

    def _accept(self, descriptor: int) -> None:
        try:
            with _socket_of(descriptor) as socket:
                cookie = _cookie(socket)
                counted = socket.family != system.AF_UNIX
        except OSError:
            return  # the client has left
        patience = self._idle if counted else self._idle_of_unix
        connection = _Connection(descriptor, cookie, patience, counted, time.monotonic())
        self._by_descriptor[descriptor] = connection


def _socket_of(descriptor: int) -> system.socket:
    return system.socket(fileno=os.dup(descriptor))


def _cookie(socket: system.socket) -> bytes:
    return socket.getsockopt(system.SOL_SOCKET, _SO_COOKIE, struct.calcsize("Q"))


def _bytes_received(socket: system.socket) -> int:
    info = socket.getsockopt(system.IPPROTO_TCP, system.TCP_INFO, _BYTES_RECEIVED.stop)
    return int.from_bytes(info[_BYTES_RECEIVED], sys.byteorder)
