"""A server in this process that is full, fails, or is to end."""

import contextlib
import threading
import time

import pytest
import torch
import zmq

from seqpar.servers.server import worker
from seqpar.servers.server.server import Server
from seqpar.servers.transport.curve_keys import Trusted, client_keys, generate, server_keys
from seqpar.servers.transport.sockets import secure
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import MAX_CONTROL_BYTES, Limits, ServerDeadlines
from seqpar.servers.wire.protocol import Busy, Failed, Stale
from tests.support.requests import random_request
from tests.support.servers import QUICK, Client, Gate, right_answer, running, wait_until
from tests.unit.servers.server.test_identity import client_folder

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


def has_ended(client):
    """Whether the server has ended a client's connection."""
    return client.lost.poll(0) != 0


@contextlib.contextmanager
def watched(*arguments):
    """A client whose socket tells when its connection is lost."""
    with Client(*arguments) as client:
        client.lost = client.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        client.socket.reconnect_ivl = -1
        yield client
        client.socket.disable_monitor()
        client.lost.close(linger=0)


def beyond_credit(client):
    """Send a request beyond the client's credits."""
    client.say(pack(REQUEST).numbered(client.generation, next(client.numbers)), *parts(REQUEST))


def without_lease(client):
    client.say(pack(REQUEST).numbered(1, 1), *parts(REQUEST))


def not_a_message(client):
    client.say(b"no message", bytes(10))


def large_text(client):
    client.say(bytes(MAX_CONTROL_BYTES + 1))


def as_a_ping(client):
    client.say(protocol.Ping(client.generation), bytes(10))


@pytest.mark.parametrize(
    "payload", [beyond_credit, without_lease, not_a_message, large_text, as_a_ping]
)
def test_payloads_without_credit_end_a_connection(tmp_path, monkeypatch, caplog, payload):
    """As many as a client has credits are allowed: they may have been on their way."""
    gate = Gate(monkeypatch)
    with (
        running(f"ipc://{tmp_path}/s", limits=SMALL) as server,
        Client(server.address) as honest,
        watched(server.address) as hostile,
    ):
        for client in (honest, hostile):
            for _ in range(SMALL.requests):
                beyond_credit(client)
        for _ in range(SMALL.requests):
            payload(hostile)
        hostile.say(protocol.StatusRequest())
        while not isinstance(hostile.hear()[0], protocol.Status):
            pass
        assert not has_ended(hostile)
        payload(hostile)
        wait_until(lambda: has_ended(hostile))
        wait_until(lambda: "it sends payloads without credit" in caplog.text)
        gate.open.set()
        for _ in range(SMALL.requests):
            assert right_answer(*honest.hear(), REQUEST)


def test_a_client_may_lose_its_lease_often(tmp_path):
    """Its requests were on their way each time, and it is served in between."""
    with running(f"ipc://{tmp_path}/s", limits=SMALL) as server, watched(server.address) as client:
        for _ in range(3):
            for _ in range(SMALL.requests):
                without_lease(client)
                assert isinstance(client.hear()[0], Stale)
            for _ in range(SMALL.requests):
                assert right_answer(*client.ask(pack(REQUEST)), REQUEST)
        assert not has_ended(client)


def test_few_requests_forgive_few_payloads(tmp_path, caplog):
    """A flood that is served now and then ends too."""
    with running(f"ipc://{tmp_path}/s", limits=SMALL) as server, watched(server.address) as client:
        for _ in range(SMALL.requests):
            without_lease(client)
            assert isinstance(client.hear()[0], Stale)
        assert right_answer(*client.ask(pack(REQUEST)), REQUEST)
        without_lease(client)
        assert isinstance(client.hear()[0], Stale)
        without_lease(client)
        wait_until(lambda: has_ended(client))
        assert "it sends payloads without credit" in caplog.text  # and is not just silent


@pytest.fixture
def two_keys(tmp_path):
    """The keys of a server, and of two clients that it trusts."""
    folder = generate(tmp_path / "keys")[0].parent
    other = client_folder(folder, "b")
    return server_keys(folder), client_keys(folder), client_keys(other)


def test_connections_of_a_key_share_credits(two_keys):
    keys, own, other = two_keys
    with (
        running("tcp://127.0.0.1:*", keys=keys, limits=Limits(requests=16)) as server,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(Client(server.address, other)) for _ in range(20)]
        first = stack.enter_context(Client(server.address, own))
        credits = [x.welcome.credits for x in clients]
        assert credits[:8] == [16, 8, 5, 4, 3, 2, 2, 2] and set(credits[8:]) == {1}
        assert first.welcome.credits == 16
        clients[1].close()
        wait_until(lambda: len(server._clients) == 20)
        assert stack.enter_context(Client(server.address, other)).welcome.credits == 1


def test_payloads_beyond_credit_end_a_keys_leases(two_keys, monkeypatch):
    """They count together, however few each connection sends."""
    gate = Gate(monkeypatch)
    keys, own, other = two_keys
    limits = Limits(tokens=4096, bytes=2**20, queued_bytes=2**24, requests=4, clients=8)
    with (
        running("tcp://127.0.0.1:*", keys=keys, limits=limits) as server,
        Client(server.address, own) as honest,
        watched(server.address, other) as first,
        watched(server.address, other) as second,
        watched(server.address, other) as idle,
    ):
        assert [x.welcome.credits for x in (first, second, idle)] == [4, 2, 1]
        for client in (first, first, first, first, second, second):
            beyond_credit(client)  # the credits are used up from now on
        wait_until(lambda: sum(x.unanswered for x in server._clients) == 6)
        for client in (first, second, first, second):
            beyond_credit(client)
            assert isinstance(client.hear()[0], Busy)
        assert not any(map(has_ended, (first, second, idle)))
        beyond_credit(second)
        for client in (first, second, idle):
            wait_until(lambda client=client: has_ended(client))
        assert not server._socket._trusted.callback("*", other.public)
        gate.open.set()
        assert right_answer(*honest.ask(pack(REQUEST)), REQUEST)


def test_connections_without_lease_share_their_payloads(two_keys):
    """Each of n may send the n-th part of all that one may send, but at least four."""
    keys, _, other = two_keys
    with (
        running("tcp://127.0.0.1:*", keys=keys, limits=Limits(requests=16)) as server,
        watched(server.address, other) as first,
        watched(server.address, other) as second,
    ):
        for _ in range(8):
            without_lease(first)
            assert isinstance(first.hear()[0], Stale)
        assert not has_ended(first)
        without_lease(first)
        wait_until(lambda: has_ended(first))
        assert not has_ended(second)


def test_each_ban_lasts_twice_as_long(two_keys, monkeypatch):
    keys, _, other = two_keys
    trusted = Trusted(keys.trusted)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def refused_seconds():
        """How long the key is refused from now on."""
        start = now[0]
        trusted.ban(other.public.decode(), 10.0)
        trusted.ban(other.public.decode(), 10.0)  # by another connection of the same flood
        while not trusted.callback("*", other.public):
            now[0] += 1.0
        return now[0] - start

    lasted = [refused_seconds() for _ in range(9)]
    assert lasted == [10, 20, 40, 80, 160, 320, 640, 640, 640]
    now[0] += 3600
    assert refused_seconds() == 10


def test_a_key_that_floods_gets_no_connection(tmp_path, monkeypatch):
    """Its open connections stay, and other keys connect."""
    folder = generate(tmp_path / "keys")[0].parent
    own, other = client_keys(folder), client_keys(client_folder(folder, "b"))
    deadlines = ServerDeadlines(idle=1000)  # seconds until the key may connect again
    with (
        running(
            "tcp://127.0.0.1:*", keys=server_keys(folder), limits=SMALL, deadlines=deadlines
        ) as server,
        Client(server.address, other) as second,
        watched(server.address, other) as hostile,
    ):
        for _ in range(SMALL.requests + 1):
            without_lease(hostile)
        wait_until(lambda: has_ended(hostile))
        with zmq.Context() as context, context.socket(zmq.DEALER) as refused:
            refused.linger = 0
            secure(refused, other)
            events = refused.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_AUTH)
            refused.connect(server.address)
            assert events.poll(20_000), "its key may connect"
            refused.disable_monitor()
            events.close(linger=0)
        assert right_answer(*second.ask(pack(REQUEST)), REQUEST)
        with Client(server.address, own) as honest:
            assert right_answer(*honest.ask(pack(REQUEST)), REQUEST)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + deadlines.idle)
        assert server._socket._trusted.callback("*", other.public)


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
        assert client.hear()[0] == Busy(client.generation, 2, 0.05)  # it waited for too long
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
