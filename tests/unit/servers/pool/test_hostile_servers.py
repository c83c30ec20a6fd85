"""A server whose messages are well-formed and absurd costs a pool no task, and little time."""

import contextlib
import math
import threading
import time

import pytest
import zmq

from seqpar.servers.check import check
from seqpar.servers.transport import client_socket
from seqpar.servers.wire import protocol
from seqpar.servers.wire.protocol import Busy, Hello, Ping, Pong, Refused, Result, Task, Welcome
from tests.support.requests import random_request
from tests.support.servers import connect, running, same, wait_until

REQUEST = random_request(0, 8, 8)
SECRET = b"s" * protocol.SECRET_BYTES
WELCOME = Welcome(
    1, SECRET, "0.1.0", "cpu", [], "zmq", credits=8, tokens=2**20, bytes=2**30, idle=10.0,
    cache_room=0,
)  # fmt: skip


class HostileServer(threading.Thread):
    """Shakes hands, answers pings, and answers each task with what `answer` makes of it.

    Attributes:
        address: for clients.
        tasks: how many tasks have arrived.
    """

    def __init__(self, answer, welcome):
        super().__init__(daemon=True)
        self._answer, self._welcome, self._ended = answer, welcome, False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address, self.tasks = f"tcp://127.0.0.1:{port}", 0

    def run(self):
        while not self._ended:
            if self._socket.poll(20):
                route, head, *_ = self._socket.recv_multipart()
                message = protocol.decode(head)
                if isinstance(message, Hello):
                    self._send(route, self._welcome)
                elif isinstance(message, Ping):
                    self._send(route, Pong(message.generation, 0, 0))
                elif isinstance(message, Task):
                    self.tasks += 1
                    self._send(route, *self._answer(message))
        self._context.destroy(linger=0)

    def _send(self, route, message, *frames):
        head = protocol.followed(protocol.encode(message, SECRET), len(frames))
        for frame in (head, *frames):
            self._socket.send_multipart([route, frame])

    def end(self):
        self._ended = True
        self.join()


@contextlib.contextmanager
def hostile(answer=lambda task: (Pong(1, 0, 0),), welcome=WELCOME):
    """A server that answers tasks so."""
    server = HostileServer(answer, welcome)
    server.start()
    try:
        yield server
    finally:
        server.end()


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e9])
def test_a_busy_server_is_asked_again_soon(monkeypatch, seconds):
    monkeypatch.setattr("seqpar.servers.pool.connection._MAX_BUSY_SECONDS", 0.05)
    with (
        hostile(lambda task: (Busy(1, task.request, seconds),)) as server,
        connect(server.address) as pool,
    ):
        future = pool.submit(REQUEST)
        wait_until(lambda: server.tasks > 3)
        assert future.cancel()


@pytest.mark.parametrize("seconds", [0.0, -1e9, -math.inf])
def test_a_busy_server_is_not_flooded(monkeypatch, seconds):
    monkeypatch.setattr("seqpar.servers.pool.connection._MIN_BUSY_SECONDS", 60.0)
    with (
        hostile(lambda task: (Busy(1, task.request, seconds),)) as server,
        connect(server.address) as pool,
    ):
        future = pool.submit(REQUEST)
        wait_until(lambda: server.tasks)
        time.sleep(0.3)
        assert server.tasks == 1 and future.cancel()


@pytest.mark.parametrize(
    ("answer", "welcome", "reason"),
    [
        (lambda task: (WELCOME,), WELCOME, "it answered the handshake a second time"),
        (lambda task: (Refused("no more"),), WELCOME, "it answered the handshake a second time"),
        pytest.param(
            None,
            protocol.msgspec.structs.replace(WELCOME, credits=0),
            "gives no credits",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["a second welcome", "a refusal of a welcomed client", "no credits"],
)
def test_a_server_that_breaks_the_protocol_is_left(answer, welcome, reason):
    """Tasks are computed in this process immediately, not after a deadline."""
    with (
        hostile(answer, welcome) as server,
        connect(server.address, deadlines={"connect": 5, "request": 60, "hedge": 61, "give_up": 62})
        as pool,
    ):  # fmt: skip
        assert same(pool.submit(REQUEST).result(50), REQUEST)
        assert any(reason in x.reason or x.lost for x in pool.report().servers[:1])


def test_a_frame_above_the_limit_ends_the_connection(monkeypatch):
    monkeypatch.setattr(client_socket, "MAX_ANSWER_BYTES", 2**12)
    with (
        hostile(lambda task: (Result(1, task.request, 0, 0.0), bytes(2**13))) as server,
        connect(server.address) as pool,
    ):
        assert same(pool.submit(REQUEST).result(50), REQUEST)
        assert pool.report().servers[0].lost


def test_a_pool_may_be_closed_in_a_callback(tmp_path):
    raised = []
    with running(f"ipc://{tmp_path}/s") as server:
        pool = connect(server.address)

        def close(future):
            try:
                pool.close()
            except RuntimeError as error:
                raised.append(error)

        future = pool.submit(REQUEST)
        future.add_done_callback(close)
        assert same(future.result(50), REQUEST)
        wait_until(lambda: not pool._dispatcher.is_alive())
        assert not raised


def test_check_names_a_missing_socket(tmp_path):
    finding = check(f"ipc://{tmp_path}/s", "zmq", None, 0.2)
    assert finding.error == f"{tmp_path}/s: No such file or directory"
