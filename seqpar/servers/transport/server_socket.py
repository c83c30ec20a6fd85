"""A server's socket, which clients with trusted keys may use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket as unix
import stat
from collections.abc import Sequence

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
from seqpar.servers.wire.payload import Buffer, Frame, view_of
from seqpar.servers.wire.protocol import followed

_SKIPPED = 1024  # frames of an overlong message dropped before other messages are read
_MOST_UNSENT = 2**14  # frames queued for a client that does not read
_MORE = 8  # control messages of a client that may be queued in addition to its requests


class ServerSocket:
    """A socket bound to an address, which must be local unless there are keys."""

    def __init__(
        self, address: str, keys: CurveKeys | None, limits: Limits, deadlines: ServerDeadlines
    ) -> None:
        check_keys("address", check_address("address", address), keys)
        self._context = zmq.Context()
        self._lock: _Lock | None = None
        self._skips = False  # whether the remaining frames of a message are being dropped
        self._authenticator: ThreadAuthenticator | None = None
        self._trusted: Trusted | None = None
        self._ban_seconds = deadlines.idle
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
        self.connections = Connections(self.socket, deadlines.idle, limits)
        try:
            self._lock = _bind(self.socket, address)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ValueError(f"address: {address} cannot be bound: {error}") from None
        self.connections.look()  # at the listener, before clients connect
        # From now on the socket itself numbers its peers and ignores ids that they claim: libzmq
        # aborts the process when a claimed id equals the next number. The listener that is already
        # bound speaks ZMTP as before. Messages to peers have one frame each.
        self.socket.set(zmq.ROUTER_RAW, 1)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[Peer, list[Frame]] | None:
        """Return the sender and the frames of the next message, or None if no message waits.

        A message from a key that is no longer trusted is dropped, and its connection ended. A
        message with far too many frames is returned without frames; they are dropped, some with
        each call.
        """
        while (received := self._next()) is not None:
            peer, frames = received
            if not self.trusts(peer):
                self.look_at_keys()  # the key may have been added since the last beat
            if self.trusts(peer) and not self.connections.ended(peer.route):
                return peer, [frame.buffer for frame in frames]
            self.cut(peer)
        return None

    def _next(self) -> tuple[Peer, list[zmq.Frame]] | None:
        """Return the sender and the frames of the next message, or None, without checking keys."""
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
        self.connections.heard(peer, frame)
        return peer, [] if self._skips else frames

    def send(
        self, peer: Peer, frames: Sequence[Buffer], track: bool = False
    ) -> list[zmq.MessageTracker] | None:
        """Send to a client without waiting; return None if it has left or does not read.

        Each frame travels as its own message. The first one has the number of frames that follow;
        empty frames are left out. If only some of the frames can be queued, the client is cut off.
        Otherwise the result has trackers, which tell when frames have left. Small frames have no
        tracker, except the last frame if `track`.
        """
        if self.connections.ended(peer.route):
            return None
        head, *parts = frames
        parts = [part for part in parts if view_of(part).nbytes]
        trackers: list[zmq.MessageTracker] = []
        for i, frame in enumerate([followed(bytes(head), len(parts)) if parts else head, *parts]):
            try:
                trackers += send(self.socket, [peer.route, frame], track and i == len(parts))
            except zmq.ZMQError:
                if i:
                    self.cut(peer)
                return None
        return trackers

    def cut(self, peer: Peer) -> None:
        """End a peer's connection: no message is read from it or sent to it from now on."""
        self.connections.end(peer.route)

    def ban(self, peer: Peer) -> None:
        """Give a peer's key no new connection for `idle` seconds; later bans are longer."""
        if self._trusted is not None:
            self._trusted.ban(peer.key, self._ban_seconds)

    @property
    def shared(self) -> bool:
        """Whether clients of several keys share the server."""
        return self._trusted is not None and len(self._trusted.keys) > 1

    def trusts(self, peer: Peer) -> bool:
        """Return whether a peer's key was trusted when the keys were last read."""
        return self._trusted is None or peer.key.encode() in self._trusted.keys

    def refusals(self) -> list[str]:
        """Return the keys whose handshakes were refused since the last call."""
        return [] if self._trusted is None else self._trusted.refusals()

    def look_at_keys(self) -> None:
        if self._trusted is not None:
            self._trusted.look()

    def beat(self) -> None:
        """Read the keys that are trusted now, and end connections that stall."""
        self.look_at_keys()
        self.connections.look()

    def close(self) -> None:
        """Close the socket; frames in its queue are sent for one more second."""
        self.connections.close()
        self.socket.close(linger=1000)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._lock is not None:
            self._lock.free()
            self._lock = None


class _Lock:
    """The right to bind a path: a lock on a file next to it, held by one process at a time."""

    def __init__(self, path: str) -> None:
        """Take the lock; raise an OSError if another server holds it."""
        self._path = f"{path}.lock"
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise OSError("another server listens there") from None
            with contextlib.suppress(OSError):  # its previous holder has removed the file
                if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                    return
            os.close(self._file)

    def free(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)


def _bind(socket: Socket, address: str) -> _Lock | None:
    """Bind a socket; only the owner may use the file of a Unix socket, which is locked.

    Without the lock and the check, ZeroMQ would take over the file of a server that still listens,
    and would delete a file that is not a socket.
    """
    if not is_own(address):
        socket.ipv6 = "[" in address
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
    """Raise an OSError if the path is a file other than a socket, or if a server listens there."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("a file is there that is no socket")
    with unix.socket(unix.AF_UNIX) as probe:
        probe.setblocking(False)  # connecting to a flooded server would block
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise OSError("another server listens there")


def _key_of(frame: zmq.Frame) -> str:
    """Return the key with which ZeroMQ authenticated a frame's connection, or ""."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
