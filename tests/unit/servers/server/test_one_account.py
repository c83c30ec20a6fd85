"""A server's memory: calls wait until it has room for them, and give it back however they end."""

import contextlib
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from grpc import StatusCode

from seqpar.core.memo import Memo
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.masks.mask import Slices
from seqpar.servers.wire.codec import KeptSlices, pack, unpack
from seqpar.servers.wire.limits import MAX_CALL_SECONDS, Limits, ServerDeadlines
from seqpar.servers.wire.request import Request
from seqpar.servers.wire.versions import joined
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.requests import random_request
from tests.support.servers import (
    Client,
    Gate,
    processes,
    running,
    same,
    usage,
    wait_until,
)

SMALL = random_request(1, 8, 8)


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
    """A task of many bytes and no work: 2 KiB per row, and 1 KiB of its result."""
    none, positions = np.empty((0, 2), np.int64), np.arange(rows, dtype=np.int32)
    slices = Slices(none, none, none, positions, positions, none)
    x = torch.zeros(1, rows, 4, 64)
    return Request(x, x, x, slices, CallOptions(1.0, 0.0, "default", True))


def size_of(request):
    """The bytes that a request takes in the account."""
    form = pack(request).form
    return sum(form.request.sizes) + sum(form.result.sizes)


def wide_request(rows):
    """A task of few bytes, whose result has 16 KiB per row."""
    none, positions = np.empty((0, 2), np.int64), np.arange(rows, dtype=np.int32)
    slices = Slices(none, none, none, positions, positions[:1], none)
    q, k, v = torch.ones(1, rows, 4, 4), torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 1024)
    return Request(q, k, v, slices, CallOptions(1.0, 0.0, "default", True))


LARGE = large_request(2048)  # 6 MiB of a payload and 2 MiB of a result
WIDE = wide_request(512)  # 8 MiB of a result, of which gRPC takes two chunks that nobody reads
PACKED, SIZE = pack(LARGE), size_of(LARGE)
ENDS = {
    "the call is cancelled": lambda client, call: call.cancel(),
    "the session ends": lambda client, call: client.session_call.cancel(),
    "the client leaves": lambda client, call: client.channel.close(),
}


class Sender:
    """The requests of a call, of which all but the first wait until the sender is closed."""

    def __init__(self, client, packed=PACKED):
        self.requests = client.requests(packed.header(client.session), packed.parts)
        self.closed = threading.Event()

    def __iter__(self):
        yield next(self.requests)
        self.closed.wait(60)

    def close(self):
        self.closed.set()


def calls_of(server):
    """The number of requests that the clients of a server have without a result."""
    return sum(session.requests for session in server._service.sessions)


@contextlib.contextmanager
def computing(server, gate, request):
    """Another client, which has a call that is being computed."""
    packed = pack(request)
    with Client(server.address) as other:
        call = other.begin(packed)
        assert gate.begun.wait(20)
        yield
        gate.open.set()
        assert same(other.hear(call, packed), request)


@contextlib.contextmanager
def in_phase(phase, server, client, gate):
    """A call that has come so far, and the bytes that the account holds without it."""
    held = 0
    with contextlib.ExitStack() as stack:
        if phase == "receiving":
            call = client.compute(stack.enter_context(contextlib.closing(Sender(client))))
            wait_until(lambda: server._service.account.held == SIZE)
        elif phase == "waiting for memory":
            stack.enter_context(computing(server, gate, LARGE))
            call, held = client.begin(PACKED), SIZE
            wait_until(lambda: calls_of(server) == 2)
        elif phase == "waiting for a thread":
            stack.enter_context(computing(server, gate, SMALL))
            call, held = client.begin(PACKED), size_of(SMALL)
            wait_until(lambda: server.status().waiting == 1)
        elif phase == "computing":
            call = client.begin(PACKED)
            assert gate.begun.wait(20)
        else:
            gate.open.set()
            call = client.begin(pack(WIDE))
            wait_until(lambda: server.status().busy_seconds)
        yield call, held


PHASES = ["receiving", "waiting for memory", "waiting for a thread", "computing", "replying"]
LIMITS = Limits(queued_bytes=int(1.5 * SIZE))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("phase", PHASES)
def test_room_is_free_when_a_call_ends(tmp_path, monkeypatch, phase, end):
    gate = Gate(monkeypatch)
    with running(f"ipc://{tmp_path}/s", limits=LIMITS) as server:
        account, client = server._service.account, Client(server.address)
        with contextlib.closing(client), in_phase(phase, server, client, gate) as (call, held):
            size = size_of(WIDE) if phase == "replying" else SIZE
            assert account.held == held + (0 if phase == "waiting for memory" else size)
            ENDS[end](client, call)
            if phase == "computing":
                if end != "the call is cancelled":
                    wait_until(lambda: not server.status().clients)
                time.sleep(0.3)
                assert account.held == SIZE, "a thread still uses its memory"
                gate.open.set()
            if (phase, end) == ("replying", "the session ends"):
                wait_until(lambda: not calls_of(server))
                call.cancel()  # gRPC may have a part of the result until then
            wait_until(lambda: account.held == held)
        wait_until(lambda: not calls_of(server) and not account.held)
        assert not server.status().waiting
        gate.open.set()
        with Client(server.address) as honest:
            assert isinstance(honest.ask(PACKED), list)
        assert account.held == 0


@pytest.mark.parametrize(("phase", "code"), [
    ("receiving", StatusCode.DEADLINE_EXCEEDED),
    ("waiting for memory", StatusCode.RESOURCE_EXHAUSTED),
    ("waiting for a thread", StatusCode.RESOURCE_EXHAUSTED),
    ("computing", None),
    ("replying", StatusCode.DEADLINE_EXCEEDED),
])  # fmt: skip
def test_room_is_free_when_a_call_takes_too_long(tmp_path, monkeypatch, phase, code):
    """A task that is being computed is computed to its end, and has a result."""
    gate = Gate(monkeypatch)
    deadlines = ServerDeadlines(request=1.0, transfer=0.5)
    with (
        running(f"ipc://{tmp_path}/s", limits=LIMITS, deadlines=deadlines) as server,
        Client(server.address) as client,
    ):
        account = server._service.account
        with in_phase(phase, server, client, gate) as (call, held):
            if phase == "computing":
                time.sleep(1.5)
                assert account.held == SIZE
                gate.open.set()
            if phase == "replying":  # gRPC may have a part of the result until the client reads
                wait_until(lambda: not calls_of(server))
            else:
                wait_until(lambda: account.held == held)
            answer = client.hear(call, pack(WIDE) if phase == "replying" else PACKED)
            assert answer == code or (code is None and isinstance(answer, list))
        wait_until(lambda: not calls_of(server) and not account.held)
        gate.open.set()
        assert same(client.ask(pack(SMALL)), SMALL)


def test_a_call_gets_room_when_another_one_ends(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with running(f"ipc://{tmp_path}/s", limits=LIMITS) as server, Client(server.address) as client:
        with in_phase("waiting for memory", server, client, gate) as (call, held):
            time.sleep(0.2)
            assert server._service.account.held == held and server.status().waiting == 0
        assert isinstance(client.hear(call, PACKED), list)
        wait_until(lambda: server._service.account.held == 0)


def test_refused_calls_give_their_room_back(tmp_path):
    with running(f"ipc://{tmp_path}/s", limits=LIMITS) as server, Client(server.address) as client:
        first, *rest = client.requests(PACKED.header(client.session), PACKED.parts)
        for requests, said in (
            ([first, *rest[:-1]], "bytes are missing"),
            ([first, *rest, joined(b"", [b"more"])], "the first request must have one"),
            ([first, rest[0], *rest], "bytes were missing"),
            ([first, b"no data", *rest], "data"),
            ([first, first, *rest], "data"),
            ([first, b"", *rest], "data"),
        ):
            call = client.compute(requests)
            assert client.hear(call, PACKED) == StatusCode.INVALID_ARGUMENT
            assert said in call.details()
            wait_until(lambda: server._service.account.held == 0)
        code, reason = client.refusal(PACKED, checksum=5)
        assert code == StatusCode.INVALID_ARGUMENT and "checksum" in reason
        wait_until(lambda: server._service.account.held == 0)


def test_requests_above_the_account_are_refused(tmp_path):
    limits = Limits(queued_bytes=2**16)
    with running(f"ipc://{tmp_path}/s", limits=limits) as server, Client(server.address) as client:
        code, reason = client.refusal(pack(large_request(64)))
        assert code == StatusCode.INVALID_ARGUMENT
        assert reason.startswith("memory: this request needs")
        assert reason.endswith("all requests together may have 65536")
        assert same(client.ask(pack(SMALL)), SMALL)


def test_only_slices_with_a_mask_need_memory_for_it(tmp_path):
    rows, keys = 768, 4096
    ranges = np.array([[0, rows]]), np.array([[0, keys]])
    positions = (np.arange(n, dtype=np.int32) for n in (rows, keys))
    q, k = torch.ones(1, rows, 1, 8), torch.ones(1, keys, 1, 8)
    full = Slices(
        *ranges, np.array([[-UNLIMITED, UNLIMITED]]), *positions, np.empty((0, 2), np.int64)
    )
    options = CallOptions(1.0, 0.0, "default", True)
    limits = Limits(queued_bytes=2**22)
    with running(f"ipc://{tmp_path}/s", limits=limits) as server, Client(server.address) as client:
        request = Request(q, k, k, full, options)
        assert same(client.ask(pack(request)), request)
        causal = replace(full, bands=np.array([[-UNLIMITED, 0]]), derived=Memo())
        code, reason = client.refusal(pack(Request(q, k, k, causal, options)))
        assert code == StatusCode.INVALID_ARGUMENT and reason.startswith("memory:")


def test_unread_results_are_bounded_and_end_in_time(tmp_path):
    """A client that reads no result has at most its calls, until their deadline."""
    limits, deadlines = Limits(requests=4), ServerDeadlines(transfer=1.0)
    with (
        running(f"ipc://{tmp_path}/s", limits=limits, deadlines=deadlines) as server,
        Client(server.address) as silent,
        Client(server.address) as honest,
    ):
        calls = [silent.begin(pack(WIDE), timeout=6.0) for _ in range(8)]
        wait_until(lambda: server.status().batches and not server.status().waiting)
        assert 0 < server._service.account.held <= 4 * size_of(WIDE)
        assert same(honest.ask(pack(SMALL)), SMALL)
        wait_until(lambda: not server._service.account.held)
        assert [call.code() for call in calls].count(StatusCode.RESOURCE_EXHAUSTED) == 4


@pytest.mark.parametrize("timeout", [None, 2 * MAX_CALL_SECONDS])
def test_calls_without_a_deadline_are_refused(tmp_path, timeout):
    with running(f"ipc://{tmp_path}/s") as server, Client(server.address) as client:
        code, reason = client.refusal(PACKED, timeout=timeout)
        assert code == StatusCode.INVALID_ARGUMENT and reason.startswith("deadline")
        assert isinstance(client.ask(PACKED, timeout=MAX_CALL_SECONDS), list)


def test_short_tasks_do_not_wait_for_long_ones(tmp_path):
    many = pack(request_of_many_slices(4096))
    with processes(tmp_path, 1) as (server,), Client(server.address) as honest:
        assert same(honest.ask(pack(SMALL)), SMALL)
        with Client(server.address) as busy:
            calls = [busy.begin(many) for _ in range(16)]
            assert same(honest.ask(pack(SMALL)), SMALL)
            assert honest.status().tasks < 2 + 16  # both short ones, and not all long ones
            del calls


def test_kept_slices_have_a_limit_in_bytes():
    kept = KeptSlices(2**16)
    for i in range(200):
        packed = pack(random_request(i, 8 + i, 64))
        arguments = packed.task, packed.checksum, packed.parts, "default", kept
        first = unpack(*arguments).slices
        assert unpack(*arguments).slices is first
        assert kept.nbytes <= 2**16


def test_a_clients_memory_is_freed_with_its_session(tmp_path):
    with processes(tmp_path, 1) as (server,):
        with Client(server.address) as client:
            assert same(client.ask(pack(SMALL)), SMALL)
        before = usage(server.process.pid)[2]
        with Client(server.address) as client:
            for i in range(40):
                shape = random_request(i, 300 + i, 2000 + i)
                assert same(client.ask(pack(shape)), shape)
            client.ask(pack(large_request(2**15)))
        wait_until(lambda: usage(server.process.pid)[2] < before + 2**26)
