"""A server in this process, and clients that keep to the protocol, or do not."""

import contextlib
import os
import pickle
import re
import socket
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from grpc import StatusCode

from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server.server import Server
from seqpar.servers.server.service import Service
from seqpar.servers.transport.one_sided import available
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.messages import Places, Step
from seqpar.servers.wire.versions import joined
from tests.support.requests import CASES, backward, forward, random_request
from tests.support.server_caches import PREFILL, drawn, part, prefilled
from tests.support.servers import (
    Client,
    Gate,
    connect,
    expected,
    running,
    same,
    wait_until,
)

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
        with Client(server.address) as other:
            assert same(other.ask(pack(REQUEST)), REQUEST)
    wait_until(lambda: not server.status().clients and not server._service.account.held)


def test_answers(client):
    for name in CASES:
        request = forward(CASES[name])
        assert same(client.ask(pack(request)), request), name
        request = backward(CASES[name], *expected(request))
        assert same(client.ask(pack(request)), request), name


@pytest.mark.parametrize("rows", [(0, 0), (0, 7), (1, 1), (7, 0), (33, 65)])
def test_few_and_odd_rows(client, rows):
    request = random_request(1, *rows)
    assert same(client.ask(pack(request)), request)


@pytest.mark.parametrize(("changes", "said"), [
    ({"q_rows": 2**62, "heads": 2**62}, "q_rows"),
    ({"k_rows": 63}, "bytes were missing"),
    ({"dim": 9}, "bytes are missing"),
    ({"heads": 3}, "heads must be a multiple of kv_heads"),
    ({"slices": 2}, "bytes are missing"),
    ({"q_rows": 4096, "heads": 512}, "payload must have at most 1048576 bytes"),
    ({"operation": "backward"}, "bytes are missing"),
    ({"operation": "step"}, "step: the operation STEP must have one"),
    ({"step": Step(1, 0, 0, 0, 0, 0)}, "step: the operation STEP must have one"),
    ({"dtype": "float64"}, "bytes are missing"),
    ({"dtype": "bfloat16"}, "bytes were missing"),
    ({"checksum": 5}, "checksum"),
    ({"places": Places(0, 0)}, "places: this server does not use NIXL"),
    ({"scale": float("nan")}, "scale"),
])  # fmt: skip
def test_a_request_that_promises_something_else_is_refused(client, changes, said):
    code, reason = client.refusal(pack(REQUEST), **changes)
    assert code == StatusCode.INVALID_ARGUMENT and re.search(said, reason), reason


@pytest.mark.parametrize("part", range(6))
def test_a_flipped_bit_of_a_payload_is_refused(client, part):
    packed = pack(REQUEST)
    packed.parts[part] = packed.parts[part].copy()
    packed.parts[part][-1] ^= 1
    code, reason = client.refusal(packed)
    assert code == StatusCode.INVALID_ARGUMENT and "checksum" in reason


@pytest.mark.parametrize(("field", "value"), [("operation", 4), ("operation", 0), ("dtype", 9)])
def test_what_is_not_known_is_named(client, field, value):
    packed = pack(REQUEST)
    message = client.version.messages.ComputeRequest.FromString(
        client.version.request(packed.header(client.session))
    )
    setattr(message.task, field, value)
    call = client.compute([joined(message.SerializeToString(), packed.parts)])
    assert client.hear(call, packed) == StatusCode.INVALID_ARGUMENT
    assert "operation, dtype: this server does not know them" in call.details()


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("name", ["Session", "Compute", "Free"])
def test_bytes_that_are_no_message_are_refused(client, tmp_path, name):
    """The first ones are a pickle, a message that is cut short, and random bytes."""
    pickled = pickle.dumps(Canary(tmp_path / "canary"))
    whole = client.version.request(pack(REQUEST).header(client.session))
    random = np.random.default_rng(0).integers(0, 256, (20, 60), np.uint8)
    for raw in (pickled, whole[:-3], b"\xff", *(x.tobytes() for x in random)):
        code, reason = client.failure(name, raw)
        assert code in (StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION), reason
    assert not (tmp_path / "canary").exists()


def test_requests_that_are_missing_or_empty_are_refused(client):
    for requests, said in (([], "without one"), ([b""], "task"), ([b"", b""], "task")):
        call = client.compute(requests)
        assert client.hear(call, pack(REQUEST)) == StatusCode.INVALID_ARGUMENT
        assert said in call.details()


def test_pickled_payloads_are_not_loaded(client, tmp_path):
    packed = pack(REQUEST)
    packed.parts[3] = np.frombuffer(pickle.dumps(Canary(tmp_path / "canary")), np.uint8)
    assert client.ask(packed) == StatusCode.INVALID_ARGUMENT
    assert not (tmp_path / "canary").exists()


def test_a_message_above_the_cap_is_refused(client):
    call = client.compute([bytes(2**22 + 1)])
    assert client.hear(call, pack(REQUEST)) == StatusCode.RESOURCE_EXHAUSTED


def test_a_call_without_a_first_message_ends_in_time(tmp_path):
    ended = threading.Event()

    def silence():
        ended.wait(60)
        yield from ()

    deadlines = ServerDeadlines(handshake=0.3)
    address = f"ipc://{tmp_path}/s"
    with running(address, deadlines=deadlines), Client(address) as client:
        call = client.compute(silence())
        assert client.hear(call, pack(REQUEST)) == StatusCode.DEADLINE_EXCEEDED
        ended.set()


METHODS = {
    "_session": "Session", "_compute": "Compute", "_free": "Free", "_status": "Status",
    "_take_room": "Compute", "_receive": "Compute", "_job": "Compute", "_reply": "Compute",
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("error", [KeyError, MemoryError, RecursionError])
def test_a_handler_that_raises_ends_its_call_alone(tmp_path, monkeypatch, caplog, name, error):
    broken = []

    def fails_if_broken(original):
        def call(*arguments):
            if broken:
                raise error("data of a payload")
            return original(*arguments)

        return call

    monkeypatch.setattr(Service, name, fails_if_broken(getattr(Service, name)))
    with running(f"ipc://{tmp_path}/s") as server, Client(server.address) as client:
        request = client.version.request(pack(REQUEST).header(client.session), pack(REQUEST).parts)
        broken.append(True)
        code, reason = client.failure(METHODS[name], request)
        assert code == StatusCode.INTERNAL and error.__name__ in reason
        assert error.__name__ in caplog.text and "payload" not in reason + caplog.text
        broken.clear()
        assert same(client.ask(pack(REQUEST)), REQUEST)
        wait_until(lambda: not server._service.account.held)


def test_what_is_not_a_number_harms_no_other(server):
    mad = random_request(5)
    mad.q[:], mad.v[:] = torch.nan, torch.inf
    with Client(server.address) as a, Client(server.address) as b:
        calls = [a.begin(pack(mad)) for _ in range(3)]
        assert same(b.ask(pack(REQUEST)), REQUEST)
        assert all(isinstance(a.hear(call, pack(mad)), list) for call in calls)


def test_more_clients_than_a_server_takes_are_refused(server):
    wait_until(lambda: not server.status().clients)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(Client(server.address))
        with pytest.raises(grpc.RpcError, match="clients: the server has 3 of at most 3"):
            Client(server.address)


@pytest.mark.parametrize(("address", "said"), [
    ("tcp://0.0.0.0:5555", "keys"), ("tcp://*:5555", "keys"), ("tcp://10.1.2.3:5555", "keys"),
    ("tcp://localhost.example.com:1", "keys"), ("udp://127.0.0.1:5", "address must"),
    ("ipc://relative", "address must"), ("tcp://127.0.0.1:99999", "address must"), (5, "address"),
    ("tcp://127.0.0.1", "address must"), ("ipc:///" + "x" * 200, "address must"),
    *((f"ipc://{path}", "address must be in a folder below /, got .*XDG_RUNTIME_DIR not set")
      for path in ("/attention-0", "//s", "/./s", "/tmp/../s", "/..", "/tmp/")),
    ("ipc:///nonexistent/folder/socket", "cannot be bound"),
])  # fmt: skip
def test_an_unusable_address_is_refused(address, said):
    with pytest.raises(ValueError, match=said):
        Server(address)


def test_a_socket_is_private_and_never_stolen(tmp_path):
    address = f"ipc://{tmp_path}/s"
    with running(address):
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0
        with pytest.raises(ValueError, match="cannot be bound: another server listens there"):
            Server(address)
        with Client(address) as client:
            assert same(client.ask(pack(REQUEST)), REQUEST)


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_a_server_may_have_an_ipv6_address():
    with running("tcp://[::1]:*") as server, Client(server.address) as client:
        assert server.address.startswith("tcp://[::1]:")
        assert same(client.ask(pack(REQUEST)), REQUEST)


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^device must be one that torch has here"):
        Server(f"ipc://{tmp_path}/s", device="cuda:99")


def listening_ports():
    """The TCP ports on which this process listens."""
    ends = {os.readlink(x) for x in Path("/proc/self/fd").iterdir() if x.is_symlink()}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {x[1] for x in lines if x[3] == "0A" and f"socket:[{x[9]}]" in ends}


def test_a_server_on_a_unix_socket_opens_no_port(tmp_path):
    """Neither does its pool, also where NIXL, which would open one, is installed."""
    before = listening_ports()
    with running(f"ipc://{tmp_path}/s", transports=None) as server:
        assert list(server.status().transports) == ["grpc"]
        with ServerPool.connect(server.address, home=False) as pool:
            assert pool.report().servers[0].transport == "grpc"
            assert listening_ports() == before


@pytest.mark.skipif(not available(), reason="needs nixl")
def test_late_writes_do_not_change_accepted_requests(tmp_path, monkeypatch):
    gate, transports = Gate(monkeypatch), ["nixl", "grpc"]
    requests = [random_request(0, 1024, 1024), random_request(1)]
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
        server.direct._bytes.fill(255)
        gate.open.set()
        assert all(same(x.result(20), r) for x, r in zip(futures, requests, strict=True))
        caches[1].extend()
        wanted = caches[1].attend(1, *part(tensors[1], PREFILL, PREFILL + 1))
        assert torch.equal(step.result(), wanted)
