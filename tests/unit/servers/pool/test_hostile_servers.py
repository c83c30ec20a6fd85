"""A server that breaks the rules costs a pool no task, no wrong bit, and little memory and time."""

import os
import socket
import threading
import time

import pytest

from seqpar.servers.pool.connection import ServerConnection
from seqpar.servers.server import service
from seqpar.servers.server_check import check
from seqpar.servers.status_client import StatusError, ask
from seqpar.servers.wire.limits import LEAST_RATE
from seqpar.servers.wire.messages import ReplyHeader
from seqpar.servers.wire.request import ServersError
from tests.support.hostile_servers import ATTACKS, IN_COMPUTE, hostile_server
from tests.support.requests import random_request
from tests.support.servers import connect, running, same, usage, wait_until

REQUESTS = [random_request(i, 64, 64) for i in range(8)]
DEADLINES = {"connect": 1.0, "request": 1.5, "hedge": 30.0, "give_up": 60.0}
MAX_BYTES = 2**28  # that the test's process may grow by; an attack would send gigabytes


class Memory(threading.Thread):
    """Watches how much this process grows."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.most = usage(os.getpid())[2]
        self.ended = threading.Event()

    def run(self):
        while not self.ended.wait(0.05):
            self.most = max(self.most, usage(os.getpid())[2])

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()


@pytest.mark.parametrize("name", ATTACKS)
def test_healthy_servers_go_on_beside_a_hostile_one(tmp_path, name):
    with (
        hostile_server(tmp_path / "hostile", name) as hostile,
        running(f"ipc://{tmp_path}/healthy") as healthy,
        Memory() as memory,
        connect(hostile, healthy.address, deadlines=DEADLINES, home=False) as pool,
    ):
        ready = 2 if name in IN_COMPUTE else 1
        wait_until(lambda: [x.state for x in pool.report().servers].count("ready") >= ready)
        start = time.monotonic()
        for _ in range(2):
            futures = [pool.submit(request) for request in REQUESTS]
            assert all(same(x.result(40), r) for x, r in zip(futures, REQUESTS, strict=True))
        seconds = time.monotonic() - start
        report = pool.report()
        assert [x.tasks for x in report.servers] == [0, 2 * len(REQUESTS), 0]
        assert report.retried or name not in IN_COMPUTE
        assert str(report).replace("\n", "").isprintable()
    assert memory.most - memory.before < MAX_BYTES
    assert seconds < 20


@pytest.mark.parametrize("name", ["no reply", "a wrong checksum"])
def test_this_process_computes_what_a_hostile_server_does_not(tmp_path, name):
    """At once, not after a deadline."""
    deadlines = {"connect": 5, "request": 60, "hedge": 61, "give_up": 62}
    with (
        hostile_server(tmp_path / "hostile", name) as hostile,
        connect(hostile, deadlines=deadlines) as pool,
    ):
        start = time.monotonic()
        assert same(pool.submit(REQUESTS[0]).result(50), REQUESTS[0])
        assert time.monotonic() - start < 20
        assert pool.report().servers[0].tasks == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a text with escape codes", r"\x1b[2J"),
        ("a message above the limit", "larger than max"),
        ("no reply", "its result ended too early"),
        ("silence", "no answer within"),
    ],
)
def test_errors_say_what_a_server_did(tmp_path, name, said):
    deadlines = {"connect": 1.0, "request": 1.5, "hedge": 2.0, "give_up": 2.5}
    with (
        hostile_server(tmp_path / "hostile", name) as hostile,
        connect(hostile, deadlines=deadlines, home=False) as pool,
    ):
        with pytest.raises(ServersError) as raised:
            pool.submit(REQUESTS[0]).result(50)
        assert said in str(raised.value) and str(raised.value).isprintable()


def test_a_busy_server_is_not_flooded(tmp_path):
    with (
        hostile_server(tmp_path / "hostile", "always busy") as hostile,
        connect(hostile, home=False) as pool,
    ):
        future = pool.submit(REQUESTS[0])
        wait_until(lambda: pool.report().retried > 3)
        before, start = pool.report().retried, time.monotonic()
        time.sleep(1)
        assert pool.report().retried - before < 1 + (time.monotonic() - start) / 0.05
        assert future.cancel()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), -1e300, 1e300])
def test_untrue_seconds_change_no_deadline_much(tmp_path, monkeypatch, seconds):
    allowances, start = [], ServerConnection.start

    def recorded(connection, work):
        start(connection, work)
        allowances.append(connection.allowance)

    monkeypatch.setattr(ServerConnection, "start", recorded)
    monkeypatch.setattr(service, "ReplyHeader", lambda x, *_: ReplyHeader(x, seconds, False))
    with running(f"ipc://{tmp_path}/s") as server, connect(server.address, home=False) as pool:
        for request in REQUESTS:
            assert same(pool.submit(request).result(20), request)
    most = 2 * 2**17 / LEAST_RATE
    assert len(allowances) == len(REQUESTS) and all(0 <= x < most for x in allowances)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n\r\n", bytes(2**16)])
def test_a_listener_that_is_no_server_is_left_in_time(said):
    """Without an answer, with one of another protocol, and with what is no protocol."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connections.append(connection)
                connection.sendall(said)

        connections = []
        threading.Thread(target=answer, daemon=True).start()
        address, start = f"tcp://127.0.0.1:{listener.getsockname()[1]}", time.monotonic()
        with connect(address) as pool:
            assert same(pool.submit(REQUESTS[0]).result(20), REQUESTS[0])
            assert pool.report().servers[0].state == "connecting"
        assert check(address, "grpc", None, 0.3).error.isprintable()
        with pytest.raises(StatusError) as raised:
            ask(address, None, 0.3)
        assert str(raised.value).isprintable() and time.monotonic() - start < 20
        listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


def test_a_pool_may_be_closed_in_a_callback(tmp_path):
    raised = []
    with running(f"ipc://{tmp_path}/s") as server:
        pool = connect(server.address)

        def close(future):
            try:
                pool.close()
            except RuntimeError as error:
                raised.append(error)

        future = pool.submit(REQUESTS[0])
        future.add_done_callback(close)
        assert same(future.result(50), REQUESTS[0])
        pool.close()
        with pytest.raises(ServersError, match="closed"):
            pool.submit(REQUESTS[0])
        assert not raised


def test_check_names_a_missing_socket(tmp_path):
    finding = check(f"ipc://{tmp_path}/s", "grpc", None, 0.2)
    assert f"{tmp_path}/s" in finding.error and "No such file" in finding.error
