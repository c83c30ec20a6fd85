"""Attention servers as processes that are killed, stopped and slowed, and clients that are."""

import gc
import itertools
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from seqpar.servers.server_check import payload
from seqpar.servers.transport.one_sided import available
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from tests.support import served
from tests.support.faults import LIMIT
from tests.support.processes import PROCESSES
from tests.support.requests import random_request
from tests.support.servers import (
    LONG_DEADLINES,
    QUICK,
    Client,
    ServerProcess,
    connect,
    expected,
    held,
    processes,
    running,
    same,
    wait_for_calls,
    wait_until,
)
from tests.tools.churn import churn

pytestmark = pytest.mark.alone
EXHAUSTIVE = pytest.mark.exhaustive
NIXL = pytest.mark.skipif(not available(), reason="needs nixl")
REQUESTS = [random_request(i, 16, 32) for i in range(8)]


def right(futures, requests=REQUESTS):
    return all(
        same(future.result(LIMIT), request)
        for future, request in zip(futures, requests, strict=True)
    )


def backward_of(request):
    """The backward of a request, with a gradient of ones."""
    import dataclasses

    from seqpar.softmax.compute.partial import OutputGradient

    out, lse = expected(request)
    output = OutputGradient.of(out.cos(), None, out, lse, None)
    return dataclasses.replace(request, output=output)


def rows():
    """All combinations; most of them are for `make test-all`."""
    quick = ("forward", "SIGKILL", "grpc"), ("backward", "SIGSTOP", "grpc")
    for row in itertools.product(["forward", "backward"], ["SIGKILL", "SIGSTOP"], ["grpc", "nixl"]):
        marks = [] if row in quick else [pytest.mark.exhaustive]
        if row[-1] == "nixl":
            marks.append(NIXL)
        yield pytest.param(*row, marks=marks)


@pytest.mark.parametrize(("direction", "how", "transport"), list(rows()))
def test_a_server_that_dies_or_hangs_is_replaced(tmp_path, direction, how, transport):
    requests = REQUESTS if direction == "forward" else list(map(backward_of, REQUESTS))
    transports = [transport, "grpc"]
    # Silence is noticed after `connect`, and death at once: long before a request's deadline.
    deadlines = LONG_DEADLINES | ({"connect": 1.0} if how == "SIGSTOP" else {})
    options = {"transports": transports, "deadlines": deadlines, "home": False}
    with processes(tmp_path, 2, slow=0.01, transports=transports) as servers:
        addresses = [server.address for server in servers]
        with connect(*addresses, **options) as pool:
            wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
            assert [x.transport for x in pool.report().servers[:2]] == [transport] * 2
            with held(tmp_path):
                futures = [pool.submit(request) for request in requests]
                wait_for_calls(tmp_path, servers)
                servers[0].signal(how)
                wait_until(lambda: pool.report().servers[0].lost)
            assert right(futures, requests)
            report = pool.report()
            assert report.retried
            assert sum(x.tasks for x in report.servers) == len(requests)
            if how == "SIGSTOP":
                servers[0].signal("SIGCONT")
                wait_until(lambda: pool.report().servers[0].state == "ready")
                with held(tmp_path):
                    futures = [pool.submit(request) for request in requests]
                    wait_for_calls(tmp_path, servers)
                assert right(futures, requests)
                report = pool.report()
                assert sum(x.tasks for x in report.servers) == 2 * len(requests)
                assert report.servers[0].tasks


def test_tasks_survive_the_death_of_all_servers(tmp_path):
    with (
        processes(tmp_path, 2) as servers,
        connect(*[server.address for server in servers], deadlines=LONG_DEADLINES) as pool,
    ):
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        with held(tmp_path):
            futures = [pool.submit(request) for request in REQUESTS]
            wait_for_calls(tmp_path, servers)
            for server in servers:
                server.signal("SIGKILL")
            assert right(futures)
        before = pool.report().servers[-1].tasks
        assert before == len(REQUESTS)
        servers[0].process.join(LIMIT)  # until then the path is its own
        again = ServerProcess(servers[0].address)
        try:
            assert again.address
            wait_until(lambda: pool.report().servers[0].state == "ready")
            assert right([pool.submit(request) for request in REQUESTS])
            assert pool.report().servers[-1].tasks == before
        finally:
            again.end()


@pytest.mark.parametrize("transport", ["grpc", pytest.param("nixl", marks=[NIXL, EXHAUSTIVE])])
def test_dying_servers_change_no_bit_of_a_step(tmp_path, transport):
    case, transports = served.CASES["sinks"], [transport, "grpc"]
    options = {"transports": transports, "deadlines": LONG_DEADLINES, "home": False, "depth": 2}

    def killing(victim, step):
        """Kill a server that has tasks. No server computes before the pool knows of the death:
        the pool may ask another server for the tasks of a slow one, and the step could end before
        the victim counts as lost."""
        with ThreadPoolExecutor(1) as thread:
            with held(tmp_path):
                running = thread.submit(step)
                wait_for_calls(tmp_path, [servers[victim]])
                servers[victim].signal("SIGKILL")
                wait_until(lambda: pool.report().servers[victim].lost)
            return running.result(LIMIT)

    with processes(tmp_path, 3, slow=0.01, transports=transports) as servers:
        addresses = [server.address for server in servers]
        with connect(*addresses, **options) as pool:
            wait_until(lambda: [x.state for x in pool.report().servers[:3]] == ["ready"] * 3)
            expected = served.call(pool, case, tasks=12)
            begun = killing(0, lambda: served.begin(pool, case, tasks=12))
            results = killing(1, lambda: served.backward(*begun))
            assert all(map(np.array_equal, results, expected))
            assert [x.lost for x in pool.report().servers[:3]] == [1, 1, 0]
            assert pool.report().retried >= 2


def test_sigterm_drains(tmp_path):
    options = {"deadlines": LONG_DEADLINES, "home": False}
    with (
        processes(tmp_path, 2, slow=0.01) as servers,
        connect(*[server.address for server in servers], **options) as pool,
    ):
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        with held(tmp_path):
            futures = [pool.submit(request) for request in REQUESTS]
            wait_for_calls(tmp_path, servers)
            servers[0].signal("SIGTERM")
            wait_until(lambda: pool.report().servers[0].state == "draining")
        assert right(futures)
        servers[0].process.join(LIMIT)
        assert servers[0].process.exitcode == 0
        report = pool.report()
        assert report.servers[0].tasks and sum(x.tasks for x in report.servers) == 8


def send_and_wait(address, pipe):
    """A client that sends requests and never reads a result."""
    client = Client(address)
    packed = pack(payload(4))
    calls = []
    pipe.send("begun")
    while True:
        if len(calls) < client.welcome.requests:
            calls.append(client.begin(packed))
        time.sleep(0.01)


def rss(pid):
    """How many bytes of memory a process has."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_closed_pool_frees_its_sockets_without_the_garbage_collector(tmp_path):
    with processes(tmp_path, 1) as (server,):
        pid = server.process.pid
        before = descriptors(pid)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with held(tmp_path), connect(server.address, home=False) as pool:
                    futures = [pool.submit(request) for request in REQUESTS]
                    wait_for_calls(tmp_path, [server])
                    for future in futures:
                        future.cancel()
                del pool, future, futures
            wait_until(lambda: descriptors(pid) <= before)
        finally:
            gc.enable()


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_clients_that_are_killed_leave_nothing_behind(tmp_path, times):
    limits = Limits(tokens=2**16, bytes=2**26, queued_bytes=2**27)
    with processes(tmp_path, 1, limits=limits, deadlines=QUICK) as (server,):
        pid = server.process.pid

        def disturb():
            pipes, clients = [], []
            for _ in range(2):
                ours, theirs = PROCESSES.Pipe(duplex=False)
                arguments = server.address, theirs
                clients.append(PROCESSES.Process(target=send_and_wait, args=arguments, daemon=True))
                clients[-1].start()
                pipes.append(ours)
            for pipe in pipes:
                assert pipe.poll(LIMIT)
            time.sleep(0.3)
            for client in clients:
                client.kill()
                client.join()
            wait_until(lambda: status(server.address).clients == 0)
            requests = [*REQUESTS, payload(4)]  # which is sent without a copy
            with connect(server.address, home=False) as pool:
                assert right([pool.submit(request) for request in requests], requests)
            wait_until(lambda: status(server.address).clients == 0)

        disturb()
        before, open_before = rss(pid), descriptors(pid)
        for _ in range(times):
            disturb()
        # gRPC closes the sockets of the last one or two connections later. A descriptor that each
        # killed client left would be two for each time.
        wait_until(lambda: descriptors(pid) <= open_before + 2)
        # The allocator may keep what a full queue took, once; each time one is filled.
        assert rss(pid) < before + limits.queued_bytes


@pytest.mark.exhaustive
def test_ten_thousand_requests_need_constant_memory(tmp_path):
    with processes(tmp_path, 1) as (server,), connect(server.address, home=False) as pool:

        def ask(times):
            for _ in range(times):
                assert right([pool.submit(request) for request in REQUESTS])
            return rss(server.process.pid)

        ask(50)  # what libraries take once
        before = ask(100 // len(REQUESTS))
        assert ask(10_000 // len(REQUESTS)) <= 1.02 * before
        assert status(server.address).tasks >= 10_000


def status(address):
    from seqpar.servers.status_client import ask

    return ask(address, None, 10.0)


def test_a_client_that_does_not_finish_the_handshake_is_cut_off():
    deadlines = ServerDeadlines(idle=1.0, handshake=1.0)
    with running("tcp://127.0.0.1:*", deadlines=deadlines) as server:
        port = int(server.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as slow:
            start = time.monotonic()
            assert cut_off(slow), "it is still connected"
            assert time.monotonic() - start < 8
            with connect(server.address, home=False) as pool:
                assert right([pool.submit(request) for request in REQUESTS])


def cut_off(connection, seconds=10.0):
    """Whether the peer ends a connection to which a byte is sent now and then."""
    connection.settimeout(0.1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            connection.sendall(b"\xff" if end - time.monotonic() > seconds - 0.05 else b"\x00")
            if not connection.recv(4096):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize(("kills", "transport"), [
    (3, "grpc"),
    pytest.param(30, "grpc", marks=pytest.mark.exhaustive),
    pytest.param(10, "nixl", marks=[pytest.mark.exhaustive, NIXL]),
])  # fmt: skip
def test_churn(tmp_path, kills, transport):
    counts = churn(tmp_path, kills, seed=0, transports=[transport, "grpc"])
    assert counts["tasks"] and counts["kills"] == kills
