"""Set up the ZeroMQ sockets of servers and clients, send frames, and wake a polling thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import zmq

from seqpar.servers.transport.curve_keys import CurveKeys
from seqpar.servers.wire.payload import Buffer, view_of

_SMALL = 2**18  # bytes; frames up to this size are faster with a copy
Socket = zmq.Socket[bytes]


def secure(socket: Socket, keys: CurveKeys | None) -> None:
    """Give a socket its keys, and a client also the server's; servers ask for clients' keys."""
    if keys is None:
        return
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    if keys.server:
        socket.curve_serverkey = keys.server
    else:
        socket.curve_server = True


def bound(socket: Socket, handshake: float, max_frame_bytes: int) -> None:
    """Cut off peers that do not authenticate within `handshake` seconds, or send larger frames."""
    socket.handshake_ivl = int(handshake * 1000)
    socket.maxmsgsize = max_frame_bytes
    socket.linger = 0


def send(socket: Socket, frames: Sequence[Buffer], track: bool = False) -> list[zmq.MessageTracker]:
    """Send frames without waiting; return trackers, which tell when frames have left.

    Small frames are copied and have no tracker, unless `track`. A zmq.Again means that the peer
    does not read; any other zmq.ZMQError means that the peer has left.
    """
    trackers = []
    for i, frame in enumerate(frames):
        flags = zmq.DONTWAIT | (zmq.SNDMORE if i + 1 < len(frames) else 0)
        view = view_of(frame)
        if view.nbytes <= _SMALL and not track:
            socket.send(view, flags)
            continue
        message = zmq.Frame(frame, track=True, copy=False, copy_threshold=0)
        tracker = socket.send(message, flags, copy=False, track=True)
        if tracker is not None:
            trackers.append(tracker)
    return trackers


class Wakeup:
    """A file descriptor that any thread or signal handler can make readable, for a poller."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._lock = threading.RLock()  # reentrant: a signal may arrive while its thread holds it

    def set(self) -> None:
        """Wake the polling thread. After `close` this does nothing."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
