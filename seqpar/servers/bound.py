"""A server's socket, with the keys of those who may use it."""

from __future__ import annotations

import errno
import os
import socket as unix
import stat
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from seqpar.servers.addresses import check_address, check_keys, is_own
from seqpar.servers.keys import Keys, trusts
from seqpar.servers.limits import Limits, ServerDeadlines
from seqpar.servers.sockets import Socket, secure, send, watch

_MORE = 8  # control messages of a client that may wait, besides its requests


class BoundSocket:
    """A socket that is bound to an address, which must be local unless there are keys.

    Attributes:
        socket: ZeroMQ's.
        address: where it is bound.
    """

    def __init__(
        self, address: str, keys: Keys | None, limits: Limits, deadlines: ServerDeadlines
    ) -> None:
        check_keys("address", check_address("address", address), keys)
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", _Trusted(keys))
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.router_mandatory = 1
        self.socket.rcvhwm = limits.requests + _MORE
        secure(self.socket, keys)
        watch(self.socket, deadlines.idle, deadlines.handshake, limits.bytes)
        try:
            _bind(self.socket, address)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ValueError(f"address: {address} cannot be bound: {error}") from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, list[Any]] | None:
        """Return who sent the next message, and its frames, or None."""
        try:
            peer, *frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        return peer.bytes, [frame.buffer for frame in frames]

    def send(self, peer: bytes, frames: Sequence[Any]) -> list[zmq.MessageTracker] | None:
        """Send to a client without waiting; None if it has left, or does not read.

        What is returned says when the frames that are not copied have left.
        """
        try:
            return send(self.socket, [peer, *frames])
        except zmq.ZMQError:
            return None

    def close(self) -> None:
        """Send for a second what has not been sent, and close."""
        self.socket.close(linger=1000)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _bind(socket: Socket, address: str) -> None:
    """Bind a socket; the file of a Unix socket is for its owner alone.

    ZeroMQ would take a file from a server that still listens there, and delete one of another kind.
    """
    if is_own(address) and os.path.lexists(path := address.removeprefix("ipc://")):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError("a file is there that is no socket")
        with unix.socket(unix.AF_UNIX) as probe:
            probe.setblocking(False)  # one that is flooded would let us wait
            if probe.connect_ex(path) != errno.ECONNREFUSED:
                raise OSError("another server listens there")
    before = os.umask(0o077)
    try:
        socket.bind(address)
    finally:
        os.umask(before)


class _Trusted:
    """Says which clients a server takes."""

    def __init__(self, keys: Keys) -> None:
        self._folder = keys.trusted

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's key is trusted now."""
        return trusts(self._folder, key)
