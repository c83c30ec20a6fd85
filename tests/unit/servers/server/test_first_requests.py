"""Calls whose first request does not end: how much of them a server takes."""

import contextlib
import socket
import struct
import threading
import time
from collections import defaultdict

import pytest

from seqpar.servers.server import service
from seqpar.servers.transport import options
from seqpar.servers.wire.limits import MAX_MESSAGE_BYTES
from tests.support.servers import Client, running, wait_until
from tests.tools.hostile_connections import (
    ACK,
    DATA,
    HELLO,
    PING,
    SERVICE,
    SETTINGS,
    WINDOW,
    frame,
    headers,
    message,
)

STREAMS = options._MAX_STREAMS
INITIAL_WINDOW = 4  # the number of this setting of HTTP/2
SILENCE = 2.0  # seconds in which a server gives no more credit


class Flood:
    """A connection whose calls each announce a long request, and send all of it but a byte."""

    def __init__(self, path, method):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.settimeout(SILENCE)
        self.received = b""
        self.initial, self.credit = 65535, defaultdict(int)  # by stream; 0 is the connection
        self.left = {2 * i + 1: MAX_MESSAGE_BYTES - 1 for i in range(STREAMS)}
        begun = [
            headers(x, **{":path": f"/{SERVICE}/{method}"})
            + message(b"", x, size=MAX_MESSAGE_BYTES)
            for x in self.left
        ]
        self.socket.sendall(HELLO + b"".join(begun))
        self.credit[0] -= 5 * STREAMS
        for stream in self.left:
            self.credit[stream] -= 5

    def send(self):
        """Send what the server gives credit for."""
        for stream in self.left:
            while True:
                credit = self.initial + min(self.credit[0], self.credit[stream])
                size = min(2**14, self.left[stream], credit)
                if size <= 0:
                    break
                self.socket.sendall(frame(DATA, 0, stream, bytes(size)))
                self.left[stream] -= size
                self.credit[stream] -= size
                self.credit[0] -= size

    def receive(self):
        """Take the server's next frames, or raise a TimeoutError."""
        self.received += self.socket.recv(2**16)
        while len(self.received) >= 9:
            end = 9 + int.from_bytes(self.received[:3], "big")
            if len(self.received) < end:
                return
            kind, flags, stream = struct.unpack(">BBI", self.received[3:9])
            data, self.received = self.received[9:end], self.received[end:]
            if kind == WINDOW:
                self.credit[stream] += int.from_bytes(data, "big")
            elif kind == SETTINGS and not flags & ACK:
                for number, value in struct.iter_unpack(">HI", data):
                    if number == INITIAL_WINDOW:
                        self.credit[0] -= value - self.initial  # which the setting does not change
                        self.initial = value
            elif kind == PING and not flags & ACK:
                self.socket.sendall(frame(PING, ACK, data=data))

    def sent(self):
        """Send until the server gives no more credit; return the bytes of all calls."""
        with contextlib.suppress(TimeoutError):
            while True:
                self.send()
                self.receive()
        return sum(MAX_MESSAGE_BYTES - 1 - left for left in self.left.values())


@pytest.mark.parametrize("method", ["Session", "Compute", "Free", "Status"])
def test_few_long_first_requests_are_received_at_a_time(tmp_path, method):
    with running(f"ipc://{tmp_path}/server"):
        flood = Flood(str(tmp_path / "server"), method)
        with flood.socket:
            sent = flood.sent()
    computes, others = service._FIRST_REQUESTS_AT_ONCE, service._CONTROL_REQUESTS_AT_ONCE
    read = (computes if method == "Compute" else others) * MAX_MESSAGE_BYTES
    assert read / 2 < sent <= read + STREAMS * options._UNREAD_BYTES


def test_calls_are_answered_after_a_flood(tmp_path):
    with running(f"ipc://{tmp_path}/server") as server:
        flood = Flood(str(tmp_path / "server"), "Status")
        with flood.socket:
            flood.sent()
        assert Client(server.address).session


def test_a_session_begins_beside_calls_that_send_nothing(tmp_path):
    """Each such call of `Compute` keeps its name's turn for 5 s; no call waits for an event."""
    with running(f"ipc://{tmp_path}/server") as server, Client(server.address) as client:
        more, silent = threading.Event(), []
        for _ in range(4):
            silent.append(client.compute(iter(more.wait, True)))
        wait_until(lambda: server._service._first_turns._users[""] == 4)
        start = time.monotonic()
        with Client(server.address):
            client.status()
        assert time.monotonic() - start < 4
        assert all(call.is_active() for call in silent)
        more.set()
