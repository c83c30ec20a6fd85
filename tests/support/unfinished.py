"""A connection whose calls send as much of a message as the server accepts, but not its end."""

import contextlib
import ssl
import struct

from tests.tools.hostile_connections import (
    ACK,
    DATA,
    GOAWAY,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    connection,
    frame,
    headers,
)

SIZE = 2**22  # bytes of each message
FRAME = 2**14
BLOCKED = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError
INITIAL_WINDOW = 4  # the number of a setting


class Unfinished:
    """A connection with unfinished calls.

    Attributes:
        sent: by call, how many bytes of its message the server has allowed the call to send.
    """

    def __init__(self, address, calls, keys=None):
        self._socket = connection(address, keys)
        self._window = 2**16 - 1  # bytes that the connection may still send
        self._initial = 2**16 - 1  # bytes that each call may send at first
        self._more = {}  # by call, bytes that the server has allowed in addition
        self._in = b""
        self.sent = {1 + 2 * i: 0 for i in range(calls)}
        self._out = PREFACE + frame(SETTINGS) + b"".join(map(headers, self.sent))

    def turn(self):
        """Send what the server allows, and read its messages; return whether anything moved."""
        before = len(self._out), sum(self.sent.values())
        self._socket.setblocking(False)
        with contextlib.suppress(*BLOCKED):
            self._hear()
        self._fill()
        with contextlib.suppress(*BLOCKED):
            while self._out:
                self._out = self._out[self._socket.send(self._out) :]
        return before != (len(self._out), sum(self.sent.values()))

    def _hear(self):
        try:
            while received := self._socket.recv(2**16):
                self._in += received
            raise AssertionError("the server has ended a connection that keeps to HTTP/2")
        finally:
            self._take_all()

    def _take_all(self):
        while len(self._in) >= 9 and len(self._in) >= 9 + (
            size := int.from_bytes(self._in[:3], "big")
        ):
            kind, flags, call = struct.unpack(">BBI", self._in[3:9])
            self._take(kind, flags, call, self._in[9 : 9 + size])
            self._in = self._in[9 + size :]

    def _take(self, kind, flags, call, body):
        assert kind != GOAWAY, body
        if kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", body):
                if number == INITIAL_WINDOW:
                    self._initial = value
            self._out += frame(SETTINGS, ACK)
        elif kind == PING and not flags & ACK:
            self._out += frame(PING, ACK, data=body)
        elif kind == WINDOW and call:
            self._more[call] = self._more.get(call, 0) + int.from_bytes(body, "big")
        elif kind == WINDOW:
            self._window += int.from_bytes(body, "big")
        elif kind == RST_STREAM:
            self.sent.pop(call, None)

    def _fill(self):
        for call, sent in self.sent.items():
            if len(self._out) > 2**20:
                return
            room = min(self._initial + self._more.get(call, 0), SIZE) - sent
            room = min(room, self._window, FRAME)
            if room > 5:
                head = b"" if sent else struct.pack(">BI", 0, SIZE)
                self._out += frame(DATA, 0, call, head + bytes(room - len(head)))
                self.sent[call] += room
                self._window -= room

    def close(self):
        self._socket.close()
