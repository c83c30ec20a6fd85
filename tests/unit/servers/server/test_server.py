"""A server in this process, and clients that keep to the protocol, or do not."""

import contextlib
import pickle
import re
import socket

import msgspec
import numpy as np
import pytest
import torch

import seqpar
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server.server import Server
from seqpar.servers.transport.one_sided import available
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.protocol import Failed, Malformed, Ping, Refused, Result, Stale
from tests.support.requests import CASES, backward, forward, random_request
from tests.support.server_caches import PREFILL, drawn, part, prefilled
from tests.support.servers import (
    Client,
    Gate,
    connect,
    expected,
    right_answer,
    running,
    same,
    wait_until,
)
from tests.tools.fuzz_protocol import Canary

REQUEST = random_request(0)
SMALL = Limits(tokens=4096, bytes=2**20, queued_bytes=2**22, requests=4, clients=3)


def has_ipv6():
    """Whether this machine has the address ::1."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with small caps."""
    address = f"ipc://{tmp_path_factory.mktemp('server')}/socket"
    with running(address, limits=SMALL, deadlines=ServerDeadlines(idle=60.0)) as server:
        yield server


@pytest.fixture
def client(server):
    """A client of it; what it breaks must harm no other."""
    with Client(server.address) as client:
        yield client
        client.say(protocol.Goodbye(client.generation))
        with Client(server.address) as other:
            assert right_answer(*other.ask(pack(REQUEST)), REQUEST)
            other.say(protocol.Goodbye(other.generation))
            other.say(protocol.StatusRequest())  # it is answered after the goodbye
            assert other.hear()[0].waiting == 0


def test_answers(client):
    for name in CASES:
        request = forward(CASES[name])
        assert right_answer(*client.ask(pack(request)), request), name
        request = backward(CASES[name], *expected(request))
        assert right_answer(*client.ask(pack(request)), request), name


@pytest.mark.parametrize("rows", [(0, 0), (0, 7), (1, 1), (7, 0), (33, 65)])
def test_few_and_odd_rows(client, rows):
    request = random_request(1, *rows)
    assert right_answer(*client.ask(pack(request)), request)


@pytest.mark.parametrize(("changes", "said"), [
    ({"q_rows": 2**62, "heads": 2**62}, "q_rows"),
    ({"k_rows": 63}, "k_positions must have"),
    ({"dim": 9}, "q must have"),
    ({"value_dim": 9}, "v must have"),
    ({"heads": 4}, "q must have"),
    ({"heads": 3}, "heads must be a multiple of kv_heads"),
    ({"slices": 2}, "slices must have"),
    ({"q_rows": 4096, "heads": 512}, "payload: 1048576 bytes"),
    ({"op": "backward"}, "payload must have"),
    ({"dtype": "float64"}, "q must have"),
    ({"checksum": 5}, "checksum"),
    ({"place": 0}, "result_place"),
    ({"result_place": 0}, "result_place"),
    ({"place": 0, "result_place": 0}, "place"),
    ({"scale": float("nan")}, "scale"),
])  # fmt: skip
def test_a_request_that_promises_something_else_is_refused(client, changes, said):
    message, frames = client.ask(pack(REQUEST), **changes)
    assert isinstance(message, Failed) and not frames
    assert re.search(said, message.reason), message.reason


def test_a_request_that_comes_again_is_refused(client):
    packed = pack(REQUEST)
    assert right_answer(*client.ask(packed), REQUEST)
    for number in (1, 0):
        message, frames = client.ask(packed, request=number)
        assert isinstance(message, Failed) and "used" in message.reason and not frames


@pytest.mark.parametrize("offset", [0, 5, 9, 40])
def test_a_flipped_bit_of_a_header_is_refused(client, offset):
    packed = pack(REQUEST)
    data = bytearray(protocol.encode(packed.numbered(client.generation, 1)))
    data[offset] ^= 4
    client.say(bytes(data), *[x.tobytes() for x in packed.parts])
    message, frames = client.hear()
    assert isinstance(message, Malformed | Refused) and not frames


@pytest.mark.parametrize("part", range(6))
def test_a_flipped_bit_of_a_payload_is_refused(client, part):
    packed = pack(REQUEST)
    packed.parts[part] = packed.parts[part].copy()
    packed.parts[part][-1] ^= 1
    message, frames = client.ask(packed)
    assert isinstance(message, Failed) and "checksum" in message.reason and not frames


@pytest.mark.parametrize("change", [{"op": "sideways"}, {"dtype": "int8"}, {"type": "Tusk"}])
def test_what_is_not_known_is_a_typed_error(client, change):
    packed = pack(REQUEST)
    fields = msgspec.to_builtins(packed.numbered(client.generation, 1)) | change
    body = msgspec.msgpack.encode(fields)
    client.say(protocol._framed(client.session + body, 0), *parts(REQUEST))
    message, _ = client.hear()
    (name,) = change
    assert isinstance(message, Malformed) and name in message.reason


def test_pickled_bytes_are_no_request(client, tmp_path):
    canary = tmp_path / "canary"
    client.say(pickle.dumps(Canary(str(canary))))
    assert isinstance(client.hear()[0], Malformed)
    packed = pack(REQUEST)
    packed.parts[3] = np.frombuffer(pickle.dumps(Canary(str(canary))), np.uint8)
    message, _ = client.ask(packed)
    assert isinstance(message, Failed) and not canary.exists()


def test_a_message_for_clients_is_refused(client):
    client.say(Result(client.generation, 1, 0, 0.0))
    assert client.hear()[0] == Malformed("message: a server takes no such message")


def test_another_generation_is_stale(client):
    message, _ = client.ask(pack(REQUEST), generation=client.generation - 1)
    assert message == Stale(client.generation - 1)
    client.say(Ping(client.generation + 1))
    assert client.hear()[0] == Stale(client.generation + 1)
    old = client.generation
    client.say(protocol.Hello("0.1.0", "test", ["zmq"], []))
    client.generation = client.hear()[0].generation
    message, _ = client.ask(pack(REQUEST), generation=old)
    assert message == Stale(old)


@pytest.mark.parametrize(("hello", "named"), [
    ({"library": "9.9.9"}, ["9.9.9", seqpar.__version__]),
    ({"transports": ["nixl"]}, ["nixl", "zmq"]),
    ({"transports": []}, ["zmq"]),
])  # fmt: skip
def test_an_incompatible_client_is_refused_naming_both(server, hello, named):
    with Client(server.address, **hello) as client:
        assert isinstance(client.welcome, Refused)
        assert all(name in client.welcome.reason for name in named)


def test_another_protocol_version_is_refused_naming_both(server):
    with Client(server.address) as client:
        data = bytearray(protocol.encode(Ping(1)))
        data[4] = 7
        client.say(bytes(data))
        message, _ = client.hear()
        assert isinstance(message, Refused) and f"speaks {protocol.VERSION}" in message.reason
        assert "the peer 7" in message.reason


def test_what_is_not_a_number_harms_no_other(server):
    mad = random_request(5)
    mad.q[:], mad.v[:] = torch.nan, torch.inf
    with Client(server.address) as a, Client(server.address) as b:
        for _ in range(3):
            a.say(pack(mad).numbered(a.generation, next(a.numbers)), *parts(mad))
        assert right_answer(*b.ask(pack(REQUEST)), REQUEST)
        for each in (a, b):
            each.say(protocol.Goodbye(each.generation))


def parts(request):
    return [x.tobytes() for x in pack(request).parts]


def test_more_clients_than_a_server_takes_are_refused(server):
    clients = [Client(server.address) for _ in range(4)]
    assert isinstance(clients[3].welcome, Refused) and "clients" in clients[3].welcome.reason
    for client in clients[:3]:
        client.say(protocol.Goodbye(client.generation))
        client.close()
    clients[3].close()


@pytest.mark.parametrize(("address", "said"), [
    ("tcp://0.0.0.0:5555", "keys"), ("tcp://*:5555", "keys"), ("tcp://10.1.2.3:5555", "keys"),
    ("tcp://localhost.example.com:1", "keys"), ("udp://127.0.0.1:5", "address must"),
    ("ipc://relative", "address must"), ("tcp://127.0.0.1:99999", "address must"), (5, "address"),
    ("tcp://127.0.0.1", "address must"), ("ipc:///" + "x" * 200, "address must"),
    ("ipc:///nonexistent/folder/socket", "cannot be bound"),
])  # fmt: skip
def test_an_unusable_address_is_refused(address, said):
    with pytest.raises(ValueError, match=said):
        Server(address, transports=["zmq"])


def test_a_socket_is_private_and_never_stolen(tmp_path):
    address = f"ipc://{tmp_path}/s"
    with running(address):
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0
        with pytest.raises(ValueError, match="cannot be bound: another server listens there"):
            Server(address, transports=["zmq"])
        with Client(address) as client:
            assert right_answer(*client.ask(pack(REQUEST)), REQUEST)


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_a_server_may_have_an_ipv6_address():
    with running("tcp://[::1]:*") as server, connect(server.address, home=False) as pool:
        assert server.address.startswith("tcp://[::1]:")
        request = random_request(0)
        assert same(pool.submit(request).result(20), request)


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^device must be one that torch has here"):
        Server(f"ipc://{tmp_path}/s", device="cuda:99")


def test_shared_memory_is_offered_only_to_this_user(tmp_path):
    for address, own in ((f"ipc://{tmp_path}/s", True), ("tcp://127.0.0.1:*", False)):
        with running(address, transports=None) as server:
            assert ("nixl" in server.status().transports) == (own and available())
            with ServerPool.connect(server.address, home=False) as pool:
                transport = "nixl" if own and available() else "zmq"
                assert pool.report().servers[0].transport == transport


@pytest.mark.skipif(not available(), reason="needs nixl")
def test_late_writes_do_not_change_accepted_requests(tmp_path, monkeypatch):
    gate, transports = Gate(monkeypatch), ["nixl", "zmq"]
    requests = [random_request(0, 1024, 1024), random_request(1)]  # the first one is never brief
    tensors = drawn(PREFILL + 1)
    with (
        running(f"ipc://{tmp_path}/s", transports=transports) as server,
        connect(server.address, transports=transports, home=False) as pool,
    ):
        caches = [prefilled(pool, tensors) for _ in range(2)]
        futures = [pool.submit(requests[0])]
        assert gate.begun.wait(20)
        futures.append(pool.submit(requests[1]))
        caches[0].extend()
        step = caches[0].post(1, *part(tensors[1], PREFILL, PREFILL + 1))
        wait_until(lambda: server.status().waiting == 2)
        server._transports["nixl"]._bytes.fill(255)
        gate.open.set()
        assert all(same(x.result(20), r) for x, r in zip(futures, requests, strict=True))
        caches[1].extend()
        wanted = caches[1].attend(1, *part(tensors[1], PREFILL, PREFILL + 1))
        assert torch.equal(step.result(), wanted)
