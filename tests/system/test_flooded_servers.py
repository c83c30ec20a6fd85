"""A server, a process of its own, under more than it takes: connections, calls that do not end,
slow clients and ten times as many tasks. Others are served meanwhile, and it ends as it began."""

import contextlib
import resource
import socket
import statistics
import time

import pytest

from seqpar.servers.transport.authority import add_client, generate
from seqpar.servers.transport.certificates import ClientIdentity
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.request import ServersError
from tests.support.requests import random_request
from tests.support.servers import (
    QUICK,
    Client,
    ServerProcess,
    connect,
    processes,
    same,
    usage,
    wait_until,
)
from tests.support.unfinished import Unfinished
from tests.tools.hostile_connections import EVERY_KIND, HELLO, attack_all, connection, headers

pytestmark = [pytest.mark.alone, pytest.mark.exhaustive]
REQUESTS = [random_request(i, 16, 32) for i in range(8)]
IDLE = 1000  # connections


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * IDLE), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def server(many_files):
    """A server at a port, which has answered once, in a process that may open enough files."""
    process = ServerProcess("tcp://127.0.0.1:*", deadlines=QUICK)
    try:
        serves(process.address)
        yield process
    finally:
        process.end()


@pytest.fixture
def keys(tmp_path):
    """A folder of keys, with another client's in `clients/other`."""
    generate(tmp_path / "keys")
    add_client(tmp_path / "keys", "other")
    return tmp_path / "keys"


@pytest.fixture
def secured(many_files, keys):
    """A server at a port that has keys."""
    process = ServerProcess("tcp://127.0.0.1:*", keys=keys)
    try:
        serves(process.address, keys)
        yield process
    finally:
        process.end()


def serves(address, keys=None):
    """Have one task computed right; return the seconds that took."""
    start = time.monotonic()
    with Client(address, keys and ClientIdentity(keys)) as client:
        assert same(client.ask(pack(REQUESTS[0])), REQUESTS[0])
    return time.monotonic() - start


def place(server):
    return "127.0.0.1", int(server.address.rpartition(":")[2])


def ends_as_it_began(server, before, keys=None):
    """A server returns memory when a session ends, except what the C library keeps of it."""

    def is_as_before():
        serves(server.address, keys)
        files, _, memory = usage(server.process.pid)
        return files <= before[0] and memory < before[2] + 2**26

    wait_until(is_as_before)


@pytest.mark.parametrize(("kind", "secured"), EVERY_KIND)
def test_ten_thousand_hostile_connections(tmp_path, kind, secured):
    attack_all(2500, tmp_path, [(kind, secured)])


@pytest.mark.parametrize("said", [b"", HELLO])
def test_connections_that_make_no_call_take_nobodys_place(server, said):
    """The server ends those that do not speak HTTP/2; the others cost little."""
    before = usage(server.process.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(connection(server.address)).sendall(said)
        assert serves(server.address) < 10
        if not said:
            wait_until(lambda: usage(server.process.pid)[0] <= before[0] + 1)
        assert usage(server.process.pid)[2] < before[2] + IDLE * 2**17
    ends_as_it_began(server, before)


def test_calls_that_send_nothing_take_little_memory(secured, keys):
    before, said = usage(secured.process.pid), HELLO + b"".join(map(headers, range(1, 512, 2)))
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            other = connection(secured.address, keys / "clients" / "other")
            stack.enter_context(other).sendall(said)
        time.sleep(1)
        assert serves(secured.address, keys) < 10
        assert usage(secured.process.pid)[2] < before[2] + 40 * 256 * 2**14
    ends_as_it_began(secured, before, keys)


def test_unfinished_messages_have_a_limit(secured, keys):
    """A call that is not read takes 64 KiB; a few of each certificate are read, and take 4 MiB."""
    before = usage(secured.process.pid)
    unfinished = [Unfinished(secured.address, 36, keys / "clients" / "other") for _ in range(4)]
    most, end = 0, time.monotonic() + 4  # the deadline of these messages is after 5 s
    while time.monotonic() < end:
        if sum(x.turn() for x in unfinished) == 0:
            time.sleep(0.01)
        most = max(most, usage(secured.process.pid)[2])
    calls = [x for each in unfinished for x in each.sent.values()]
    assert sum(x > 2**16 for x in calls) <= 4 and sum(x > 2**15 for x in calls) > 72
    assert most < before[2] + 4 * 36 * 2**16 + 4 * 2**22 + 2**26
    assert serves(secured.address, keys) < 10
    for each in unfinished:
        each.close()
    ends_as_it_began(secured, before, keys)


def test_slow_clients_do_not_slow_others(server):
    """Connections that stall after one byte do not double the others' 99th percentile.

    The limit has 1 ms more, for a switch between threads.
    """

    def times():
        with connect(server.address, home=False) as pool:
            for task in range(101):
                start = time.perf_counter()
                assert same(pool.submit(REQUESTS[0]).result(20), REQUESTS[0])
                if task:  # the first one of a session takes longest
                    yield time.perf_counter() - start

    def times_among_slow_clients():
        with contextlib.ExitStack() as stack:
            slow = [stack.enter_context(socket.create_connection(place(server))) for _ in range(32)]
            for connection in slow:
                connection.sendall(b"P")
            yield from times()

    # Many short alternating turns, so that other processes slow both measurements equally.
    alone, among = [], []
    for _ in range(20):
        alone += times()
        among += times_among_slow_clients()
    alone, among = (statistics.quantiles(x, n=100)[-1] for x in (alone, among))
    assert among < 2 * alone + 1e-3


def test_servers_handle_ten_times_their_task_limit(tmp_path):
    limits = Limits(tokens=4096, bytes=2**20, queued_bytes=2**22, requests=2)
    with processes(tmp_path, 1, limits=limits) as (server,):
        serves(server.address)
        before = usage(server.process.pid)
        pools = [connect(server.address, depth=8, home=False) for _ in range(10)]
        try:
            for _ in range(5):
                futures = [(r, pool.submit(r)) for r in REQUESTS for pool in pools]
                assert all(same(future.result(30), request) for request, future in futures)
            counts = [pool.report().servers[0].tasks for pool in pools]
            assert counts == [5 * len(REQUESTS)] * len(pools)
        finally:
            for pool in pools:
                pool.close()
        assert usage(server.process.pid)[2] < before[2] + limits.queued_bytes + 2**24


def test_dead_servers_give_a_clear_and_timely_error(tmp_path):
    deadlines = {"connect": 0.5, "request": 1.0, "hedge": 2.0, "give_up": 3.0}
    with (
        processes(tmp_path, 2, slow=0.3) as servers,
        connect(*[x.address for x in servers], home=False, deadlines=deadlines) as pool,
    ):
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        futures = [pool.submit(request) for request in REQUESTS * 4]
        for server in servers:
            server.signal("SIGKILL")
        start = time.monotonic()
        for future in futures:
            with contextlib.suppress(ServersError):
                future.result(20)
        assert time.monotonic() - start < deadlines["give_up"] + 1
        with pytest.raises(ServersError, match="a task has no result after 3 s"):
            futures[-1].result()
