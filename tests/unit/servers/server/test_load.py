"""A server in this process that is full, stalled, fails, or is to end."""

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest
import torch
from grpc import StatusCode

from seqpar.servers.server import worker
from seqpar.servers.server.server import Server
from seqpar.servers.server.service import _PAUSE_SECONDS
from seqpar.servers.transport.event_loop import start
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from tests.support.faults import LIMIT
from tests.support.processes import PROCESSES
from tests.support.requests import random_request
from tests.support.servers import Client, Gate, running, same, wait_until
from tests.unit.servers.server.test_caches import step
from tests.unit.servers.server.test_one_account import LARGE, Sender, calls_of

REQUEST = random_request(0)
PACKED = pack(REQUEST)
SMALL = Limits(tokens=4096, bytes=2**20, queued_bytes=2**22, requests=4, clients=3)


def test_a_full_server_serves_clients_in_turn(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with (
        running(f"ipc://{tmp_path}/s", limits=SMALL) as server,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(Client(server.address)) for _ in range(3)]
        calls = [(clients[0], clients[0].begin(PACKED))]
        assert gate.begun.wait(20)
        calls += [(x, x.begin(PACKED)) for x in clients for _ in range(3 if x is clients[0] else 4)]
        wait_until(lambda: server.status().waiting == 11)
        for client in clients:
            code, reason = client.refusal(PACKED)
            assert code == StatusCode.RESOURCE_EXHAUSTED and reason.startswith("requests: ")
        assert server.status().refused == 3
        gate.open.set()
        assert all(same(client.hear(call, PACKED), REQUEST) for client, call in calls)
        # the first call has one request, the next all others
        assert sum(gate.calls) == 12 and max(gate.calls) > 3


def test_cheap_calls_of_a_name_take_turns(tmp_path):
    with running(f"ipc://{tmp_path}/s") as server, Client(server.address) as client:
        before = time.monotonic()
        calls = [client.begin(PACKED, session=bytes(16)) for _ in range(20)]
        assert {client.hear(call, PACKED) for call in calls} == {StatusCode.FAILED_PRECONDITION}
        assert time.monotonic() - before >= 20 * _PAUSE_SECONDS
        before = time.monotonic()
        assert {client.free(i) for i in range(20)} == {StatusCode.OK}
        assert time.monotonic() - before >= 20 * _PAUSE_SECONDS


def test_stalled_senders_do_not_block_others_of_their_name(tmp_path):
    with running(f"ipc://{tmp_path}/s") as server, Client(server.address) as client:  # noqa: SIM117
        with contextlib.ExitStack() as stack:
            senders = [stack.enter_context(contextlib.closing(Sender(client))) for _ in range(8)]
            stalled = [client.compute(sender) for sender in senders]
            account = server._service.account
            wait_until(lambda: calls_of(server) == 8)
            held = account.held
            assert same(client.ask(pack(LARGE)), LARGE)
            assert same(client.ask(PACKED), REQUEST)
            wait_until(lambda: account.held == held)
            assert all(call.is_active() for call in stalled)


class Calls:
    """Stands in for the contexts of many calls, whose requests come when a test says so."""

    def __init__(self):
        self.reading, self.most, self.go_on = 0, 0, asyncio.Event()

    async def read(self):
        self.reading += 1
        self.most = max(self.most, self.reading)
        try:
            await self.go_on.wait()
            return b""
        finally:
            self.reading -= 1


def test_few_chunks_of_a_name_are_read_at_a_time(tmp_path, monkeypatch):
    """The senders of all others are held by flow control."""
    monkeypatch.setattr("seqpar.servers.server.service._PATIENCE_SECONDS", 60.0)
    header = pack(LARGE).header(b"")

    async def check(service):
        many, one = Calls(), Calls()
        receive = service._receive
        tasks = [asyncio.create_task(receive("many", header, b"", many)) for _ in range(20)]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(receive("one", header, b"", one)))
        await asyncio.sleep(0.05)
        assert many.most == 2 and one.reading == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        assert many.reading == one.reading == 0 and not service._turns._turns

    with running(f"ipc://{tmp_path}/s") as server:
        start(check(server._service)).result(20)


def test_an_abandoned_request_is_not_computed(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    deadlines = ServerDeadlines(request=1.0)
    with (
        running(f"ipc://{tmp_path}/s", deadlines=deadlines) as server,
        Client(server.address) as client,
    ):
        first = client.begin(PACKED)
        assert gate.begun.wait(10)
        late, cancelled = client.begin(PACKED), client.begin(PACKED)
        wait_until(lambda: server.status().waiting == 2)
        cancelled.cancel()
        wait_until(lambda: server.status().waiting == 1)
        assert client.hear(late, PACKED) == StatusCode.RESOURCE_EXHAUSTED
        gate.open.set()
        assert same(client.hear(first, PACKED), REQUEST) and gate.calls == [1]


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.OutOfMemoryError, ValueError])
def test_a_computation_that_fails_harms_no_other_request(tmp_path, monkeypatch, error):
    gate = Gate(monkeypatch)
    bad = random_request(3, 40, 40)

    def compute(requests, device):
        if any(x.q.shape == bad.q.shape for x in requests):
            raise error("no data of anybody's")
        return gate(requests, device)

    monkeypatch.setattr(worker, "compute", compute)
    with running(f"ipc://{tmp_path}/s") as server, Client(server.address) as client:
        requests, calls = [REQUEST, bad, REQUEST, bad, REQUEST], []
        for number, request in enumerate(requests):
            calls.append(client.begin(pack(request)))
            if not number:
                assert gate.begun.wait(10)
        wait_until(lambda: server.status().waiting == 4)
        gate.open.set()
        for request, call in zip(requests, calls, strict=True):
            answer = client.hear(call, pack(request))
            if request is bad:
                assert answer == StatusCode.INTERNAL
                assert call.details() == f"the computation failed: {error.__name__}"
            else:
                assert same(answer, request)
        assert same(client.ask(PACKED), REQUEST)


def keep_cache(address):
    """Have a session with a cache until this process ends."""
    with Client(address) as client:
        client.ask(step(3))
        time.sleep(600)


def test_a_frozen_client_loses_its_session_and_memory(tmp_path):
    """It answers no keepalive of gRPC."""
    deadlines = ServerDeadlines(idle=2.0)
    with (
        running(f"ipc://{tmp_path}/s", deadlines=deadlines) as server,
        Client(server.address) as honest,
    ):
        frozen = PROCESSES.Process(target=keep_cache, args=(server.address,), daemon=True)
        frozen.start()
        try:
            wait_until(lambda: server.status().caches, LIMIT)
            os.kill(frozen.pid, signal.SIGSTOP)
            wait_until(lambda: not server.status().caches)
            assert server.status().clients == 1 and not server.status().cache_bytes
            assert same(honest.ask(PACKED), REQUEST)
        finally:
            frozen.kill()
            frozen.join(LIMIT)


def test_a_stopping_server_answers_what_it_has(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with running(f"ipc://{tmp_path}/s") as server, Client(server.address) as client:
        call = client.begin(PACKED)
        assert gate.begun.wait(10)
        server.stop()
        while not client.event().state.draining:
            pass
        code, reason = client.refusal(PACKED)
        assert code == StatusCode.UNAVAILABLE and "leave" in reason
        gate.open.set()
        assert same(client.hear(call, PACKED), REQUEST)


def test_a_server_ends_with_its_compute_thread(tmp_path, monkeypatch):
    """So that whoever started it starts another; its tasks go elsewhere."""
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    monkeypatch.setattr(worker.Worker, "_take", lambda self, long: 1 // 0)
    server = Server(f"ipc://{tmp_path}/s", deadlines=ServerDeadlines(drain=1.0))
    thread = threading.Thread(target=poke, args=(server.address,))
    thread.start()
    with pytest.raises(RuntimeError, match="the compute thread has ended"):
        server.run()
    thread.join()


def poke(address):
    """Ask a server for something."""
    with Client(address) as client:
        client.ask(PACKED, timeout=2)  # it has none
