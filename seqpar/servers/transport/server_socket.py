"""A server's socket, with the keys of those who may use it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket as unix
import stat
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from seqpar.servers.transport.addresses import (
    check_address,
    check_keys,
    fault_of_folder,
    is_own,
    path_of,
)
from seqpar.servers.transport.connections import Connections
from seqpar.servers.transport.curve_keys import CurveKeys, Trusted
from seqpar.servers.transport.peers import Peer
from seqpar.servers.transport.sockets import Socket, bound, secure, send
from seqpar.servers.wire.limits import MAX_FRAMES, Limits, ServerDeadlines
from seqpar.servers.wire.protocol import followed

_SKIPPED = 1024  # frames of one that has more that are dropped before others are served
_MOST_UNSENT = 2**14  # frames that wait for a client that does not read
_MORE = 8  # control messages of a client that may wait, besides its requests


class ServerSocket:
    """A socket that is bound to an address, which must be local unless there are keys.

    Attributes:
        socket: ZeroMQ's.
        address: where it is bound.
    """

    def __init__(
        self, address: str, keys: CurveKeys | None, limits: Limits, deadlines: ServerDeadlines
    ) -> None:
        check_keys("address", check_address("address", address), keys)
        self._context = zmq.Context()
        self._lock: _Lock | None = None
        self._skips = False  # whether the rest of a message is dropped
        self._authenticator: ThreadAuthenticator | None = None
        self._trusted: Trusted | None = None
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._trusted = Trusted(keys.trusted)
            self._authenticator.configure_curve_callback("*", self._trusted)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.router_mandatory = 1
        self.socket.sndhwm = _MOST_UNSENT
        self.socket.rcvhwm = limits.requests + _MORE
        secure(self.socket, keys)
        bound(self.socket, deadlines.handshake, limits.bytes)
        self._connections = Connections(self.socket, deadlines.idle, limits)
        try:
            self._lock = _bind(self.socket, address)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ValueError(f"address: {address} cannot be bound: {error}") from None
        # From now on the socket itself numbers its peers and ignores ids that they claim: libzmq
        # aborts the process when a claimed id equals the next number. What is bound already speaks
        # ZMTP as before. Messages to peers have one frame each.
        self.socket.set(zmq.ROUTER_RAW, 1)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[Peer, list[Any]] | None:
        """Return who sent the next message, and its frames, or None.

        A message of a key that is no longer trusted ends its connection and is dropped. A message
        of far too many frames has none here; they are dropped, some with each call.
        """
        while (received := self._next()) is not None:
            peer, frames = received
            if not self.trusts(peer):
                self.look_at_keys()  # the key may have been added since the last beat
            if self.trusts(peer) and not self._connections.ended(peer.route):
                return peer, [frame.buffer for frame in frames]
            self.cut(peer)
        return None

    def _next(self) -> tuple[Peer, list[zmq.Frame]] | None:
        """Return the next message, and who sent it, or None."""
        for _ in range(_SKIPPED * self._skips):
            if not self.socket.recv(copy=False).more:
                self._skips = False
                break
        if self._skips:
            return None
        try:
            route = frame = self.socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        frames: list[zmq.Frame] = []
        while frame.more and not self._skips:
            frame = self.socket.recv(copy=False)
            frames.append(frame)
            self._skips = frame.more and len(frames) == MAX_FRAMES
        # Without keys a client can claim any User-Id, of any bytes, in its handshake.
        authenticated = frames and self._trusted is not None
        peer = Peer(route.bytes, _key_of(frames[0]) if authenticated else "")
        self._connections.heard(peer, frame)
        return peer, [] if self._skips else frames

    def send(
        self, peer: Peer, frames: Sequence[Any], track: bool = False
    ) -> list[zmq.MessageTracker] | None:
        """Send to a client without waiting; None if it has left, or does not read.

        Each frame travels as a message; the first says how many follow, and empty ones are left
        out. A client that takes some of a message and not all is cut off. The trackers tell when
        frames have left; small frames have none, except the last one if `track`.
        """
        if self._connections.ended(peer.route):
            return None
        head, *parts = frames
        parts = [part for part in parts if memoryview(part).nbytes]
        trackers: list[zmq.MessageTracker] = []
        for i, frame in enumerate([followed(head, len(parts)) if parts else head, *parts]):
            try:
                trackers += send(self.socket, [peer.route, frame], track and i == len(parts))
            except zmq.ZMQError:
                if i:
                    self.cut(peer)
                return None
        return trackers

    def cut(self, peer: Peer) -> None:
        """End a connection: nothing passes on it from now on."""
        self._connections.end(peer.route)

    @property
    def shared(self) -> bool:
        """Whether clients of several keys share the server."""
        return self._trusted is not None and len(self._trusted.keys) > 1

    def trusts(self, peer: Peer) -> bool:
        """Return whether a peer's key was trusted when keys were last looked at."""
        return self._trusted is None or peer.key.encode() in self._trusted.keys

    def refusals(self) -> list[str]:
        """Return the keys of handshakes that were refused since the last call."""
        return [] if self._trusted is None else self._trusted.refusals()

    def look_at_keys(self) -> None:
        """Read the keys that are trusted now."""
        if self._trusted is not None:
            self._trusted.look()

    def beat(self) -> None:
        """Read the keys that are trusted now, and end connections that stall."""
        self.look_at_keys()
        self._connections.look()

    def close(self) -> None:
        """Send for a second what has not been sent, and close."""
        self._connections.close()
        self.socket.close(linger=1000)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._lock is not None:
            self._lock.free()
            self._lock = None


class _Lock:
    """The right to bind a path, which one process has at a time, by a lock on a file next to it."""

    def __init__(self, path: str) -> None:
        """Take it; an OSError says that another server has it."""
        self._path = f"{path}.lock"
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise OSError("another server listens there") from None
            with contextlib.suppress(OSError):  # it was removed by whoever had it
                if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                    return
            os.close(self._file)

    def free(self) -> None:
        """Give it back."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)


def _bind(socket: Socket, address: str) -> _Lock | None:
    """Bind a socket; the file of a Unix socket is for its owner alone, and is locked.

    ZeroMQ would take a file from a server that still listens there, and delete one of another kind.
    """
    if not is_own(address):
        socket.bind(address)
        return None
    path = path_of(address)
    if (fault := fault_of_folder(path)) is not None:
        raise OSError(fault)
    lock = _Lock(path)
    try:
        _check_free(path)
        before = os.umask(0o077)
        try:
            socket.bind(address)
        finally:
            os.umask(before)
    except BaseException:
        lock.free()
        raise
    return lock


def _check_free(path: str) -> None:
    """Raise an OSError if a file that is no socket is there, or a server listens."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("a file is there that is no socket")
    with unix.socket(unix.AF_UNIX) as probe:
        probe.setblocking(False)  # one that is flooded would let us wait
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise OSError("another server listens there")


def _key_of(frame: zmq.Frame) -> str:
    """Return the key with which ZeroMQ authenticated a frame's connection, or ""."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
