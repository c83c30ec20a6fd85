"""A server in this process that is full, fails, or is to end."""

import threading
import time

import pytest
import torch

from seqpar.servers.server import worker
from seqpar.servers.server.server import Server
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.protocol import Busy, Failed, Stale
from tests.support.requests import random_request
from tests.support.servers import QUICK, Client, Gate, right_answer, running, wait_until

REQUEST = random_request(0)
SMALL = Limits(tokens=4096, bytes=2**20, queued_bytes=2**22, requests=4, clients=3)


def parts(request):
    return [x.tobytes() for x in pack(request).parts]


def test_a_full_server_serves_clients_in_turn(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with running(f"ipc://{tmp_path}/s", limits=SMALL) as server:
        clients = [Client(server.address) for _ in range(3)]
        packed = pack(REQUEST)
        for client in clients:
            for _ in range(6):
                number = next(client.numbers)
                client.say(packed.numbered(client.generation, number), *parts(REQUEST))
        busy = [client.hear()[0] for client in clients for _ in range(2)]
        assert all(isinstance(x, Busy) and x.request > 4 for x in busy)
        assert server.status().refused == 6
        gate.open.set()
        for client in clients:
            for _ in range(4):
                assert right_answer(*client.hear(), REQUEST)
        # the first call has one request, the next all others
        assert sum(gate.calls) == 12 and max(gate.calls) > 3
        for client in clients:
            client.close()


def test_an_abandoned_request_is_not_computed(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    deadlines = ServerDeadlines(request=0.3)
    with running(f"ipc://{tmp_path}/s", deadlines=deadlines) as server:
        client, packed = Client(server.address), pack(REQUEST)
        client.say(packed.numbered(client.generation, 1), *parts(REQUEST))
        assert gate.begun.wait(10)
        client.say(packed.numbered(client.generation, 2), *parts(REQUEST))
        client.say(packed.numbered(client.generation, 3), *parts(REQUEST))
        client.say(protocol.Cancel(client.generation, 3))
        assert client.hear()[0] == Failed(client.generation, 3, "it was cancelled")
        assert client.hear()[0] == Failed(client.generation, 2, "it waited for too long")
        gate.open.set()
        assert right_answer(*client.hear(), REQUEST) and gate.calls == [1]
        client.close()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.OutOfMemoryError, ValueError])
def test_a_computation_that_fails_harms_no_other_request(tmp_path, monkeypatch, error):
    gate = Gate(monkeypatch)
    bad = random_request(3, 40, 40)

    def compute(requests, device):
        if any(x.q.shape == bad.q.shape for x in requests):
            raise error("no data of anybody's")
        return gate(requests, device)

    monkeypatch.setattr(worker, "compute", compute)
    with running(f"ipc://{tmp_path}/s") as server:
        client = Client(server.address)
        requests = [REQUEST, bad, REQUEST, bad, REQUEST]
        for request in requests:
            header = pack(request).numbered(client.generation, next(client.numbers))
            client.say(header, *parts(request))
        assert gate.begun.wait(10)
        time.sleep(0.3)
        gate.open.set()
        answers = {}
        for _ in requests:
            message, frames = client.hear()
            answers[message.request] = message, frames
        for i, request in enumerate(requests):
            message, frames = answers[i + 1]
            if request is bad:
                assert message.reason == f"the computation failed: {error.__name__}"
            else:
                assert right_answer(message, frames, request)
        assert right_answer(*client.ask(pack(REQUEST)), REQUEST)
        client.close()


def test_a_silent_client_loses_its_lease_and_memory(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with running(f"ipc://{tmp_path}/s", deadlines=QUICK) as server:
        client, packed = Client(server.address), pack(REQUEST)
        for number in (1, 2, 3):
            client.say(packed.numbered(client.generation, number), *parts(REQUEST))
        assert gate.begun.wait(10)
        wait_until(lambda: server.status().clients == 0 and not server.status().waiting)
        gate.open.set()
        message, _ = client.ask(packed)
        assert isinstance(message, Stale)
        client.close()


def test_a_stopping_server_answers_what_it_has(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with running(f"ipc://{tmp_path}/s") as server:
        client, packed = Client(server.address), pack(REQUEST)
        client.say(packed.numbered(client.generation, 1), *parts(REQUEST))
        assert gate.begun.wait(10)
        server.stop()
        assert client.hear()[0] == protocol.Draining(client.generation)
        message, _ = client.ask(packed, request=2)
        assert isinstance(message, Failed) and "leave" in message.reason
        gate.open.set()
        assert right_answer(*client.hear(), REQUEST)
        client.close()


def test_a_server_ends_with_its_compute_thread(tmp_path, monkeypatch):
    """So that whoever started it starts another; its tasks go elsewhere."""
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    monkeypatch.setattr(worker.Worker, "_take", lambda self: 1 // 0)
    server = Server(f"ipc://{tmp_path}/s", transports=["zmq"])
    thread = threading.Thread(target=poke, args=(server.address,))
    thread.start()
    with pytest.raises(RuntimeError, match="the compute thread has ended"):
        server.run()
    thread.join()


def poke(address):
    """Ask a server for something."""
    with Client(address) as client:
        client.say(pack(REQUEST).numbered(client.generation, 1), *parts(REQUEST))
        time.sleep(0.5)
