"""Payloads that take longer than signs of life may: healthy servers live, dead ones are found."""

import contextlib
import itertools
import math
import socket
import struct
import time

import numpy as np
import pytest
import torch
import zmq

from seqpar.core.ranges import UNLIMITED
from seqpar.layout.masks.mask import Slices
from seqpar.servers.check import payload
from seqpar.servers.pool.connection import ServerConnection
from seqpar.servers.transport.curve_keys import client_keys, generate, server_keys
from seqpar.servers.transport.sockets import secure
from seqpar.servers.transport.zeromq import pieces
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import LEAST_RATE, PIECE_BYTES, ServerDeadlines
from seqpar.servers.wire.payload import Payload, PayloadTensor, RequestError
from seqpar.servers.wire.protocol import Ping, Pong, Stale, decode, encode
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.requests import random_request
from tests.support.servers import (
    Client,
    ServerProcess,
    connect,
    right_answer,
    running,
    same,
    wait_until,
)
from tests.support.slow_link import slow_link
from tests.support.zmtp import dealer, frame
from tests.unit.servers.server.test_identity import client_folder

RATE = 4e6  # bytes per second
SHORT = ServerDeadlines(idle=0.75)  # seconds, half as long as a payload takes
DEADLINES = {"connect": 0.5, "request": 0.6, "hedge": 0.7, "give_up": 0.8}
SMALL = random_request(0)


def full_request(rows, keys, heads, dim, value_dim):
    """Each query attends to each key."""
    generator = torch.Generator().manual_seed(1)
    shapes = (1, rows, heads, dim), (1, keys, heads, dim), (1, keys, heads, value_dim)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    ranges = (
        np.array([[0, rows]]),
        np.array([[0, keys]]),
        np.array([[-UNLIMITED, UNLIMITED]]),
    )
    positions = np.arange(rows, dtype=np.int32), np.arange(keys, dtype=np.int32)
    slices = Slices(*ranges, *positions, np.empty((0, 2), np.int64))
    return Request(q, k, v, slices, CallOptions(0.1, 0.0, "default", True))


def large_payload():
    """A task of 6 MiB, almost all of them keys, with a small result."""
    return full_request(64, 3072, 4, 128, 1)


def large_result():
    """A small task with a result of 6 MiB."""
    return full_request(1536, 4, 1, 8, 1024)


@pytest.fixture
def server(request):
    """A server in a process of its own."""
    deadlines = getattr(request, "param", SHORT)
    made = ServerProcess("tcp://127.0.0.1:*", deadlines=deadlines)
    try:
        assert made.address
        yield made
    finally:
        made.end()


def sent_once(pool, link, request):
    """Have a task computed; it must be sent once, to a server that is not lost."""
    result = pool.submit(request).result(60)
    report, form = pool.report(), pack(request).form
    first = report.servers[0]
    assert (report.retried, report.hedged, first.lost, first.tasks) == (0, 0, 0, 1), report
    nbytes = form.request.room + form.result.room
    assert sum(link.passed) < 1.1 * nbytes + 2**17
    return result


@pytest.mark.alone
@pytest.mark.parametrize("make", [large_payload, large_result])
def test_a_task_passes_a_slow_link_once(server, make):
    request = make()
    with (
        slow_link(RATE, server.address) as link,
        connect(link.address, home=False, deadlines=DEADLINES) as pool,
    ):
        assert same(sent_once(pool, link, request), request)


@pytest.mark.alone
def test_a_transfer_is_no_straggler(server, tmp_path):
    """Most tasks are small; another server without work is not asked for a large one."""
    request = payload(6)
    with (
        running("tcp://127.0.0.1:*") as other,
        slow_link(RATE, server.address) as first,
        slow_link(RATE, other.address) as second,
        connect(first.address, second.address, home=False) as pool,
    ):
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        for _ in range(25):
            assert same(pool.submit(payload(0)).result(20), payload(0))
        before = pool.report()
        assert same(pool.submit(request).result(60), request)
        assert pool.report().hedged == before.hedged


@pytest.mark.alone
@pytest.mark.exhaustive
@pytest.mark.parametrize("keyed", [False, True])
def test_92_megabytes_at_8_megabytes_per_second(tmp_path, keyed):
    """All deadlines are the defaults."""
    request = payload(122)  # q, k and v are 92 MiB, and the result is 31
    folder = generate(tmp_path / "keys")[0].parent if keyed else None
    server = ServerProcess("tcp://127.0.0.1:*", keys=server_keys(folder) if keyed else None)
    names = "connect", "request", "hedge", "give_up"
    deadlines = dict(zip(names, (5.0, 30.0, 60.0, 120.0), strict=True))
    try:
        with (
            slow_link(8e6, server.address) as link,
            connect(link.address, home=False, deadlines=deadlines, keys=folder) as pool,
        ):
            assert same(sent_once(pool, link, request), request)
    finally:
        server.end()


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "cable"])
def test_a_death_during_a_transfer_is_noticed(server, tmp_path, fault):
    """After `connect`, of 1 s at least, though the deadline by bytes is far away."""
    request = large_payload()
    with (
        running(f"ipc://{tmp_path}/s") as other,
        slow_link(RATE, server.address) as link,
        connect(link.address, home=False, deadlines=DEADLINES) as pool,
    ):
        future, before = pool.submit(request), link.passed[0]
        wait_until(lambda: link.passed[0] > before + 2**20)
        pool._dispatcher.serve_at([link.address, other.address])
        start = time.monotonic()
        if fault == "cable":
            link.rate = 0
        else:
            server.signal(fault)
        assert same(future.result(60), request)
        assert time.monotonic() - start < 5
        dead, alive, _ = pool.report().servers
        assert (dead.lost, dead.tasks, alive.tasks) == (1, 0, 1)
        if fault != "SIGKILL":
            assert pool.report().servers[0].state == "connecting"


@contextlib.contextmanager
def pulse(client, keys=None):
    """Another connection to a client's server."""
    with client.context.socket(zmq.DEALER) as made:
        made.linger = 0
        secure(made, keys)
        made.connect(client.address)
        yield made


def test_pings_pass_payloads():
    """The server hears of a client whose payload is held half-way."""
    request, half = large_payload(), 3 * 2**20
    long = {"request": 60.0, "hedge": 90.0, "give_up": 120.0}
    with (
        running("tcp://127.0.0.1:*") as server,
        slow_link(1e9, server.address) as link,
        connect(link.address, home=False, deadlines=long) as pool,
    ):
        wait_until(lambda: link.connections == 2)
        (lease,) = server._clients
        link.hold_after = half
        result = pool.submit(request)
        wait_until(lambda: link.passed[0] >= half)
        for _ in range(3):  # pings after the payload on its connection are held too
            before = lease.seen
            wait_until(lambda before=before: lease.seen > before)
        assert not lease.jobs
        link.hold_after = math.inf
        assert same(result.result(60), request)


def test_a_pulse_needs_key_and_secret(tmp_path):
    folder = generate(tmp_path / "keys")[0].parent
    other = client_keys(client_folder(folder, "b"))
    own = client_keys(folder)
    with (
        running("tcp://127.0.0.1:*", keys=server_keys(folder)) as server,
        Client(server.address, own) as client,
    ):
        (lease,) = server._clients
        generation, right = client.generation, client.session
        for keys, secret, number in (
            (other, right, generation), (own, b"x" * 16, generation), (own, bytes(16), generation),
            (own, right, generation + 1),
        ):  # fmt: skip
            with pulse(client, keys) as socket:
                socket.send(encode(Ping(number), secret))
                assert decode(socket.recv()) == Stale(number) and lease.pulse is None
        with pulse(client, own) as first, pulse(client, own) as second:
            for socket in (first, second):
                socket.send(encode(Ping(generation), right))
                assert isinstance(decode(socket.recv()), Pong)
            assert len(server._clients._pulses) == 1  # the last one
            for message in (protocol.Goodbye(generation), protocol.Cancel(generation, 1)):
                second.send(encode(message, right))
                while isinstance(answer := decode(second.recv()), Pong):
                    pass
                assert answer == Stale(generation)
            assert right_answer(*client.ask(pack(SMALL)), SMALL)
            client.say(protocol.Goodbye(generation))
            wait_until(lambda: not len(server._clients))
            assert not server._clients._pulses
            second.send(encode(Ping(generation), right))
            assert not second.poll(300) or isinstance(decode(second.recv()), Pong | Stale)


def test_a_revoked_key_loses_its_pulse(tmp_path):
    folder = generate(tmp_path / "keys")[0].parent
    with (
        running("tcp://127.0.0.1:*", keys=server_keys(folder)) as server,
        connect(server.address, keys=folder, home=False),
    ):
        wait_until(lambda: len(server._clients._pulses) == 1)
        (folder / "trusted" / "client.public").unlink()
        wait_until(lambda: not server._clients._pulses and not len(server._clients))


@pytest.mark.alone
def test_results_are_signs_of_life_themselves(server):
    """Its pings get no answer, and those of the server on the first one wait for the result."""
    request = large_result()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        slow_link(RATE, server.address, f":{silent.getsockname()[1]}") as link,
        connect(link.address, home=False, deadlines=DEADLINES) as pool,
    ):
        wait_until(lambda: link.connections == 2)
        assert same(sent_once(pool, link, request), request)
        assert same(pool.submit(SMALL).result(20), SMALL)
        assert pool.report().servers[0].lost == 0  # the server has heard of the client


def test_the_second_connection_is_optional(tmp_path, monkeypatch):
    dial, count = ServerConnection._dial, itertools.count()

    def nowhere(link):
        if next(count):
            monkeypatch.setattr(link, "address", f"ipc://{tmp_path}/nothing")
        return dial(link)

    monkeypatch.setattr(ServerConnection, "_dial", nowhere)
    with (
        running(f"ipc://{tmp_path}/s", deadlines=SHORT) as server,
        connect(server.address, home=False),
    ):
        (lease,) = server._clients
        time.sleep(2 * SHORT.idle)
        assert list(server._clients) == [lease] and lease.pulse is None


def test_connections_to_different_servers_share_signs_of_life(tmp_path):
    """As behind a balancer of connections: the second one ends at a stranger."""
    with (
        running("tcp://127.0.0.1:*") as first,
        running("tcp://127.0.0.1:*") as second,
        slow_link(1e8, first.address, second.address) as link,
        connect(link.address, home=False) as pool,
    ):
        wait_until(lambda: link.connections == 2)
        end = time.monotonic() + 1.5  # longer than a server may be silent
        while time.monotonic() < end:
            assert same(pool.submit(SMALL).result(20), SMALL)
        server, _ = pool.report().servers
        assert server.lost == 0 and link.connections == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("server", [ServerDeadlines(idle=4.0)], indirect=True, ids=[""])
def test_a_trickled_message_is_cut_despite_pings(server):
    """The message's frame does not end within `idle`; the lease ends with the connection."""
    with dealer(int(server.address.rpartition(":")[2])) as raw:
        hello = encode(protocol.Hello("0.1.0", "trickler", ["zmq"], []))
        raw.sendall(bytes([0, len(hello)]) + hello)
        welcome = decode(frame(raw))
        raw.sendall(b"\x02" + struct.pack(">Q", PIECE_BYTES))
        raw.settimeout(0.02)
        ended, end = False, time.monotonic() + 20
        with Client(server.address) as other, pulse(other) as beats:
            while not ended:
                assert time.monotonic() < end, "the connection goes on"
                beats.send(encode(Ping(welcome.generation), welcome.secret))
                try:
                    raw.sendall(b"x")
                    ended = raw.recv(2**16) == b""
                except TimeoutError:
                    continue
                except OSError:
                    ended = True
            wait_until(lambda: _answer(beats, welcome) == Stale(welcome.generation))
        with Client(server.address) as honest:
            assert right_answer(*honest.ask(pack(SMALL)), SMALL)


def _answer(socket, welcome):
    """The last answer to a ping; a connection that was cut is opened again by ZeroMQ."""
    socket.send(encode(Ping(welcome.generation), welcome.secret))
    answer = None
    while socket.poll(100):
        answer = decode(socket.recv())
    return answer


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, 7), (0, 3 * 2**20, 0, 2**20 + 1, 4)])
def test_pieces_are_put_together(sizes):
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, n, dtype=np.uint8) for n in sizes]
    form = Payload([PayloadTensor("x", torch.uint8, (n,)) for n in sizes])
    found = pieces(parts)
    assert all(memoryview(x).nbytes <= PIECE_BYTES for x in found)
    for frames in (list(found), [x for x in found if len(x)]):  # a server leaves out empty ones
        back = form.whole(frames)
        assert [bytes(x) for x in back] == [bytes(x) for x in parts]


def test_pieces_of_unknown_parts_are_refused():
    form = Payload([PayloadTensor(name, torch.uint8, (10,)) for name in "qk"])
    for sizes in ((5, 4, 1, 9), (5, 6, 9), (10, 10, 1), (20,), (), (15, 5)):
        with pytest.raises(RequestError, match="must have"):
            form.check_sizes(form.whole([bytes(n) for n in sizes]))


def test_deadlines_depend_on_bytes_and_the_measured_rate(tmp_path):
    with running(f"ipc://{tmp_path}/s") as server, connect(server.address, home=False) as pool:
        (link,) = pool._dispatcher.servers
        packed = pack(large_payload())
        nbytes = packed.form.request.room + packed.form.result.room
        before, start = link._session.bytes_per_second, link.start
        seen = []
        link.start = lambda work: (start(work), seen.append(link.allowance))[0]
        for _ in range(2):
            begun = time.monotonic()
            assert same(pool.submit(large_payload()).result(20), large_payload())
            least = nbytes / (time.monotonic() - begun)
            wait_until(lambda: not link.attempts)
        assert before == 0.0 and seen[0] == 2 * nbytes / LEAST_RATE
        assert seen[1] < seen[0] and link._session.bytes_per_second >= least and not link.allowance
