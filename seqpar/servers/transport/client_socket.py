"""A client's socket to one server, and the events that report its loss."""

from __future__ import annotations

import math
import os
import socket as unix
import struct
import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from seqpar.servers.transport.addresses import fault_of_socket, is_own, path_of
from seqpar.servers.transport.curve_keys import CurveKeys
from seqpar.servers.transport.sockets import bound, secure, send
from seqpar.servers.wire.limits import MAX_ANSWER_BYTES
from seqpar.servers.wire.payload import Buffer, Frame
from seqpar.servers.wire.protocol import frames_after

_LOST = (
    zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
# Milliseconds before ZeroMQ reconnects by itself; the socket is closed long before. With -1 ZeroMQ
# would drop the last answers of a server that leaves.
_NEVER = 3_600_000
_UNIX = zmq.Event.CONNECTED | zmq.Event.CLOSED  # needed to check who listens at a Unix socket


def _user_at(descriptor: int) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    with unix.socket(fileno=os.dup(descriptor)) as peer:
        size = struct.calcsize("3i")
        credentials = peer.getsockopt(unix.SOL_SOCKET, unix.SO_PEERCRED, size)
    user: int = struct.unpack("3i", credentials)[1]
    return user


class ClientSocket:
    """A socket that connects to an address.

    A Unix socket's file must be this user's; the folders above it and the process that listens
    there may also be root's. Nothing is sent before that is known. Call `connect` until it is
    connected. Making it raises a zmq.ZMQError if the process has too many sockets or open files.
    The poller has `socket` and `monitor`, which are readable when frames or events have arrived.
    `heard` is when the last frame arrived, on the monotonic clock.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        address: str,
        keys: CurveKeys | None,
        deadline: float,
    ) -> None:
        self._poller, self._address, self._own = poller, address, is_own(address)
        self._connected, self._trusted, self.heard = False, not self._own, -math.inf
        self._frames: list[zmq.Frame] = []  # of a message that has not arrived completely
        self._unsent: list[Sequence[Buffer]] = []  # until the listening process is checked
        self.socket = context.socket(zmq.DEALER)
        try:
            secure(self.socket, keys)
            bound(self.socket, deadline, MAX_ANSWER_BYTES)
            self.socket.ipv6 = "[" in address
            if self._own:
                self.socket.reconnect_ivl = _NEVER  # another process may listen there next
            self.monitor = self.socket.get_monitor_socket(_LOST | (_UNIX if self._own else 0))
        except zmq.ZMQError:
            self.socket.close(linger=0)  # otherwise the context could not end
            raise
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        self.connect()

    def connect(self) -> str | None:
        """Connect, unless that was done before; return why that is not possible yet."""
        if self._connected:
            return None
        if self._own and (fault := fault_of_socket(path_of(self._address))) is not None:
            return fault
        try:
            self.socket.connect(self._address)
        except zmq.ZMQError as error:
            return f"it cannot be connected to: {error}"
        self._connected = True
        return None

    def _check_listener(self, descriptor: int) -> str | None:
        """Send the waiting frames if the listening process is this user's or root's."""
        try:
            user = _user_at(descriptor)
        except OSError:
            return "it has left"
        if user not in (0, os.geteuid()):
            return "the process that listens there is another user's"
        self._trusted = True
        unsent, self._unsent = self._unsent, []
        reasons = [reason for frames in unsent if (reason := self.send(frames)) is not None]
        return reasons[0] if reasons else None

    def receive(self) -> list[Frame] | None:
        """Return the frames of the next message if all have arrived, or None."""
        while True:
            try:
                self._frames += self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return None
            self.heard = time.monotonic()
            if len(self._frames) > frames_after(self._frames[0].buffer):
                frames, self._frames = self._frames, []
                return [frame.buffer for frame in frames]

    def send(self, frames: Sequence[Buffer]) -> str | None:
        """Send without waiting; return why that is impossible, or None."""
        if not self._trusted:
            self._unsent.append(frames)
            return None
        try:
            send(self.socket, frames)
        except zmq.ZMQError as error:
            return f"it takes nothing: {error}"
        return None

    def broken(self) -> str | None:
        """Return why the connection was lost, or None."""
        reason = None
        while self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            event = message["event"]
            if event == zmq.Event.CONNECTED:
                reason = self._check_listener(message["value"]) or reason
            elif event == zmq.Event.CLOSED:
                reason = reason or "nothing listens there"
            elif event == zmq.Event.DISCONNECTED:
                reason = reason or "it has left"
            else:
                reason = "it refuses the handshake: are the keys right?"
        return reason

    def close(self, linger: int) -> None:
        """Close it; it may still send for `linger` milliseconds."""
        self._poller.unregister(self.socket)
        self._poller.unregister(self.monitor)
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger)
