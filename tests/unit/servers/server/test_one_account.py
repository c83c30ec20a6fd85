"""What one client asks for costs no other client its turn, and its memory ends with its lease."""

import time

import numpy as np
import pytest
import torch
import zmq

from seqpar.core.ranges import UNLIMITED
from seqpar.layout.masks.mask import Slices
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import KeptSlices, pack, unpack
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.protocol import library_version
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.processes import PROCESSES
from tests.support.requests import random_request
from tests.support.servers import (
    QUICK,
    Client,
    cpu_seconds,
    processes,
    right_answer,
    running,
    usage,
    wait_until,
)

SMALL = random_request(1, 8, 8)
PING = 0.3  # seconds that a server may compute before it answers a ping


def request_of_many_slices(count):
    """A task of few bytes and much work: each slice is one query row over all of 64 key rows."""
    rows = np.arange(count, dtype=np.int64) % 64
    q_rows = np.stack([rows, rows + 1], 1)
    keys = np.arange(count, dtype=np.int64) // 64 % 64
    k_rows = np.stack([keys, keys + 1], 1)
    bands = np.tile([[-UNLIMITED, UNLIMITED]], (count, 1))
    positions = np.arange(64, dtype=np.int32)
    none = np.empty((0, 2), np.int64)
    slices = Slices(q_rows, k_rows, bands, positions, positions, none)
    x = torch.ones(1, 64, 1, 8)
    return Request(x, x, x, slices, CallOptions(1.0, 0.0, "default", True))


def large_request(rows):
    none, positions = np.empty((0, 2), np.int64), np.arange(rows, dtype=np.int32)
    slices = Slices(none, none, none, positions, positions, none)
    x = torch.zeros(1, rows, 4, 64)
    return Request(x, x, x, slices, CallOptions(1.0, 0.0, "default", True))


def busiest_pong(pid, client, until):
    """The most that a server computes from a ping to its pong, as long as `until()` is false.

    In seconds of its threads on a core, which other processes do not lengthen.
    """
    busiest = 0.0
    while not until():
        while client.socket.poll(0):
            client.socket.recv_multipart()
        start = cpu_seconds(pid)
        client.say(protocol.Ping(client.generation))
        assert client.socket.poll(20_000)
        busiest = max(busiest, cpu_seconds(pid) - start)
        time.sleep(0.01)
    return busiest


def send(address, kind):
    """Send a server what takes it long to read or to compute; the main function of a process."""
    with Client(address) as client:
        for _ in range(20):  # until the server knows that such a task is brief
            client.ask(pack(SMALL))
        if kind == "many frames":
            client.say(protocol.Knock(), *[b""] * 300_000)
            client.ask(pack(SMALL))
        elif kind == "many slices":
            client.ask(pack(request_of_many_slices(4096)))
        else:
            client.ask(pack(large_request(2**16)))


@pytest.mark.parametrize("kind", ["many slices", "a large payload", "many frames"])
def test_pings_are_answered_whatever_a_client_sends(tmp_path, kind):
    with processes(tmp_path, 1) as (server,), Client(server.address) as other:
        sender = PROCESSES.Process(target=send, args=(server.address, kind), daemon=True)
        sender.start()
        busiest = busiest_pong(server.process.pid, other, lambda: not sender.is_alive())
        assert sender.exitcode == 0 and busiest < PING
        assert right_answer(*other.ask(pack(SMALL)), SMALL)


def test_short_tasks_do_not_wait_for_long_ones(tmp_path):
    many = pack(request_of_many_slices(4096))
    with processes(tmp_path, 1) as (server,), Client(server.address) as honest:
        assert right_answer(*honest.ask(pack(SMALL)), SMALL)
        with Client(server.address) as busy:
            for number in range(1000, 1016):
                header = many.numbered(busy.generation, number)
                busy.say(header, *[x.tobytes() for x in many.parts])
            assert right_answer(*honest.ask(pack(SMALL)), SMALL)
            with Client(server.address) as asks:
                asks.say(protocol.StatusRequest())
                assert asks.hear()[0].tasks < 2 + 16  # both short ones, and not all long ones


def test_requests_above_the_account_are_refused(tmp_path):
    limits = Limits(queued_bytes=2**16)
    with running(f"ipc://{tmp_path}/s", limits=limits) as server, Client(server.address) as client:
        message, _ = client.ask(pack(large_request(64)))
        assert isinstance(message, protocol.Failed)
        assert message.reason.startswith("memory: all requests may have 65536 bytes")
        assert right_answer(*client.ask(pack(SMALL)), SMALL)


def test_small_results_count_until_they_are_read(tmp_path):
    """A client that reads nothing gets no more than its share, however small its results are."""
    packed, count = pack(random_request(0, 900, 16)), 400
    size = packed.form.request.room + packed.form.result.room
    limits = Limits(queued_bytes=2**23)
    assert max(packed.form.result.sizes) < 2**18 and count * size > 4 * limits.queued_bytes
    with running(f"ipc://{tmp_path}/s", limits=limits) as server, zmq.Context() as context:  # noqa: SIM117
        with context.socket(zmq.DEALER) as silent:
            silent.linger, silent.rcvhwm = 0, 1
            silent.connect(server.address)
            silent.send(protocol.encode(protocol.Hello(library_version(), "test", ["zmq"], [])))
            welcome = protocol.decode(silent.recv())
            for number in range(1, count + 1):
                header = packed.numbered(welcome.generation, number)
                data = protocol.encode(header, welcome.secret)
                silent.send_multipart([data, *[x.tobytes() for x in packed.parts]])
                wait_until(lambda: server.totals.tasks + server.totals.refused == number)  # noqa: B023
            assert server.totals.tasks * size < 2 * limits.queued_bytes


def test_kept_slices_have_a_limit_in_bytes():
    kept = KeptSlices(2**16)
    for i in range(200):
        packed = pack(random_request(i, 8 + i, 64))
        first = unpack(packed.numbered(1, 1), packed.parts, "default", kept).slices
        assert unpack(packed.numbered(1, 2), packed.parts, "default", kept).slices is first
        assert kept.nbytes <= 2**16


def test_kept_slices_give_way_to_requests(tmp_path):
    large = pack(large_request(256))
    limits = Limits(queued_bytes=large.form.request.room + large.form.result.room)
    with running(f"ipc://{tmp_path}/s", limits=limits) as server, Client(server.address) as client:
        for i in range(20):
            request = random_request(i, 8 + i, 64)
            assert right_answer(*client.ask(pack(request)), request)
        (lease,) = server._clients
        assert lease.kept.nbytes > 0
        wait_until(lambda: isinstance(client.ask(large)[0], protocol.Result))


def test_a_clients_memory_is_freed_with_its_lease(tmp_path):
    with processes(tmp_path, 1, deadlines=QUICK) as (server,):
        with Client(server.address) as client:
            assert right_answer(*client.ask(pack(SMALL)), SMALL)
        before = usage(server.process.pid)[2]
        with Client(server.address) as client:
            for i in range(40):
                shape = random_request(i, 300 + i, 2000 + i)
                assert right_answer(*client.ask(pack(shape)), shape)
            client.ask(pack(large_request(2**15)))
            client.say(protocol.Goodbye(client.generation))
        wait_until(lambda: usage(server.process.pid)[2] < before + 2**26)
