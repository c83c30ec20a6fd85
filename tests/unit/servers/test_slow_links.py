"""Payloads that take longer than signs of life may: healthy servers live, dead ones are found."""

import time

import numpy as np
import pytest
import torch

from seqpar.core.ranges import UNLIMITED
from seqpar.layout.masks.mask import Slices
from seqpar.servers.server_check import payload
from seqpar.servers.transport.authority import generate
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import LEAST_RATE, ServerDeadlines
from seqpar.servers.wire.payload import (
    CHUNK_BYTES,
    Incoming,
    Payload,
    PayloadTensor,
    RequestError,
    chunks,
)
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.servers import ServerProcess, connect, running, same, wait_until
from tests.support.slow_link import slow_link

RATE = 4e6  # bytes per second
# A ping of gRPC waits behind the bytes of a payload that the system has, which take up to 1 s here.
SHORT = ServerDeadlines(idle=3.0)
DEADLINES = {"connect": 0.5, "request": 0.6, "hedge": 0.7, "give_up": 0.8}


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
    folder = tmp_path / "keys" if keyed else None
    if keyed:
        generate(folder)
    server = ServerProcess("tcp://127.0.0.1:*", keys=folder)
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
        wait_until(lambda: pool.report().servers[0].lost)
        dead, alive, _ = pool.report().servers
        assert (dead.lost, dead.tasks, alive.tasks) == (1, 0, 1)
        if fault != "SIGKILL":
            assert pool.report().servers[0].state == "connecting"


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, 7), (0, 3 * 2**20, 0, 2**20 + 1, 4)])
def test_chunks_are_put_together(sizes):
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, n, dtype=np.uint8) for n in sizes]
    form = Payload([PayloadTensor("x", torch.uint8, (n,)) for n in sizes])
    found = [b"".join(map(bytes, chunk)) for chunk in chunks(parts)]
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in found)
    incoming = Incoming(form)
    for chunk in found:
        incoming.take(chunk)
    assert not incoming.missing
    assert [bytes(x) for x in incoming.parts] == [bytes(x) for x in parts]
    with pytest.raises(RequestError, match="0 bytes were missing, 1 came"):
        incoming.take(b"x")


def test_deadlines_depend_on_bytes_and_the_measured_rate(tmp_path):
    with running(f"ipc://{tmp_path}/s") as server, connect(server.address, home=False) as pool:
        (link,) = pool._dispatcher.servers
        packed = pack(large_payload())
        nbytes = packed.form.request.room + packed.form.result.room
        before, start = link._bytes_per_second, link.start
        seen = []
        link.start = lambda work: (start(work), seen.append(link.allowance))[0]
        for _ in range(2):
            begun = time.monotonic()
            assert same(pool.submit(large_payload()).result(20), large_payload())
            least = nbytes / (time.monotonic() - begun)
            wait_until(lambda: not link.attempts)
        assert before == 0.0 and seen[0] == 2 * nbytes / LEAST_RATE
        assert seen[1] < seen[0] and link._bytes_per_second >= least and not link.allowance
