"""A client's socket to one server, with what says whether that is still there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from seqpar.servers.keys import Keys
from seqpar.servers.sockets import secure, send, watch

_LOST = (
    zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class DialledSocket:
    """A socket that connects to an address; a poller says when something has arrived.

    Attributes:
        socket, monitor: what a poller says to be readable.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        address: str,
        keys: Keys | None,
        deadline: float,
    ) -> None:
        self._poller = poller
        self.socket = context.socket(zmq.DEALER)
        secure(self.socket, keys)
        watch(self.socket, 2 * deadline, deadline, -1)
        self.monitor = self.socket.get_monitor_socket(_LOST)
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        self.socket.connect(address)

    def receive(self) -> list[Any] | None:
        """Return the frames of the next message, or None."""
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        return [frame.buffer for frame in frames]

    def send(self, frames: Sequence[Any]) -> str | None:
        """Send without waiting; return why that is not possible, or None."""
        try:
            send(self.socket, frames)
        except zmq.ZMQError as error:
            return f"it takes nothing: {error}"
        return None

    def broken(self) -> str | None:
        """Return why the connection was lost, or None."""
        reason = None
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.Event.DISCONNECTED:
                reason = reason or "it has left"
            else:
                reason = "it refuses the handshake: are the keys right?"
        return reason

    def close(self, linger: int) -> None:
        """Close it, after so many milliseconds in which it may still send."""
        self._poller.unregister(self.socket)
        self._poller.unregister(self.monitor)
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger)
