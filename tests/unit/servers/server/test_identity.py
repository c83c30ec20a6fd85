"""What belongs to a client's certificate: sessions, calls, caches, and its share of a server."""

import contextlib
import threading
import time

import grpc
import pytest
from grpc import StatusCode

from seqpar.servers.server import service as service_module
from seqpar.servers.server import worker as worker_module
from seqpar.servers.transport.authority import add_client, generate, revoke, rotate
from seqpar.servers.transport.certificates import ClientIdentity, ServerIdentity
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.versions import joined
from tests.support.requests import random_request
from tests.support.servers import (
    Client,
    Gate,
    ServerProcess,
    connect,
    running,
    same,
    wait_until,
)
from tests.unit.servers.server.test_caches import step
from tests.unit.servers.test_open_calls import Open

REQUEST = random_request(0)


@pytest.fixture
def folder(tmp_path):
    """A folder of keys: of a server, and of the clients a and b."""
    generate(tmp_path / "keys")
    for name in "ab":
        add_client(tmp_path / "keys", name)
    return tmp_path / "keys"


@pytest.fixture
def keys(folder):
    return {name: ClientIdentity(folder / "clients" / name) for name in "ab"}


@contextlib.contextmanager
def serving(folder, **options):
    with running("tcp://127.0.0.1:*", keys=ServerIdentity(folder), **options) as server:
        yield server


def test_another_certificate_does_not_take_a_session(folder, keys):
    """Even who knows the secret of a session reaches nothing of it."""
    with (
        serving(folder) as server,
        Client(server.address, keys["a"]) as a,
        Client(server.address, keys["b"]) as b,
    ):
        assert isinstance(a.ask(step(3)), list)
        for secret in (a.session, bytes(16), b"", b.session[:-1]):
            for packed in (pack(REQUEST), step(3), step(3, writes=1, start=3)):
                assert b.ask(packed, session=secret) == StatusCode.FAILED_PRECONDITION
            assert b.free(1, session=secret or b"x") == StatusCode.FAILED_PRECONDITION
        assert server.status().caches == 1
        assert isinstance(a.ask(step(3, writes=1, start=3)), list)
        assert same(b.ask(pack(REQUEST)), REQUEST)


@pytest.mark.parametrize("secret", [b"", bytes(16), b"x" * 16, b"x" * 1000])
def test_calls_without_a_sessions_secret_are_refused(tmp_path, secret):
    with running(f"ipc://{tmp_path}/s") as server, Client(server.address) as client:
        assert client.ask(pack(REQUEST), session=secret) == StatusCode.FAILED_PRECONDITION
        assert same(client.ask(pack(REQUEST)), REQUEST)


def test_a_session_of_the_same_name_is_reached_by_its_secret(folder, keys):
    """A name's calls may travel on several connections, as a pool's do."""
    with (
        serving(folder) as server,
        Client(server.address, keys["a"]) as first,
        Client(server.address, keys["a"]) as second,
    ):
        assert isinstance(first.ask(step(3)), list)
        assert second.ask(step(3, writes=1, start=3)) == StatusCode.NOT_FOUND
        later = step(3, writes=1, start=3)
        assert isinstance(second.ask(later, session=first.session), list)


def test_one_name_cannot_take_all_sessions(folder, keys):
    with serving(folder, limits=Limits(clients=6)) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(Client(server.address, keys["a"]))
        for _ in range(5):
            with pytest.raises(grpc.RpcError, match="clients: the server has 3 of at most 6"):
                Client(server.address, keys["a"])
        with Client(server.address, keys["b"]) as honest:
            assert same(honest.ask(pack(REQUEST)), REQUEST)


def test_sessions_of_a_name_share_its_requests(folder, keys):
    with (
        serving(folder, limits=Limits(requests=16)) as server,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(Client(server.address, keys["b"])) for _ in range(20)]
        shares = [x.welcome.requests for x in clients]
        assert shares[:8] == [16, 8, 5, 4, 3, 2, 2, 2] and set(shares[8:]) == {1}
        first = stack.enter_context(Client(server.address, keys["a"]))
        assert first.welcome.requests == 16
        clients[1].close()
        wait_until(lambda: server.status().clients == 20)
        assert stack.enter_context(Client(server.address, keys["b"])).welcome.requests == 1


@pytest.mark.parametrize("place", ["computed", "read"])
def test_names_do_not_wait_for_each_other(folder, keys, monkeypatch, place):
    """A task of one name has a result while a task of another name is computed, or is read."""
    module, name = (worker_module, "compute") if place == "computed" else (service_module, "unpack")
    released, original = threading.Event(), getattr(module, name)

    def blocks(first, *arguments):
        if (first[0].q.shape[1] if place == "computed" else first.q_rows) == 9999:
            assert released.wait(20)
        return original(first, *arguments)

    monkeypatch.setattr(module, name, blocks)
    blocked, large = random_request(1, 9999, 64), random_request(2, 8888, 64)
    with (
        serving(folder) as server,
        Client(server.address, keys["a"]) as a,
        Client(server.address, keys["b"]) as b,
    ):
        calls = [a.begin(pack(blocked)) for _ in range(2)]
        try:
            for request in (REQUEST, large, REQUEST):
                assert same(b.ask(pack(request)), request)
        finally:
            released.set()
        assert all(same(a.hear(call, pack(blocked)), blocked) for call in calls)


def test_a_revoked_certificate_is_cut_within_a_beat(folder, keys, caplog):
    with (
        serving(folder) as server,
        Client(server.address, keys["a"]) as a,
        Client(server.address, keys["b"]) as b,
    ):
        assert same(b.ask(pack(REQUEST)), REQUEST)
        assert isinstance(b.ask(step(3)), list)
        revoke(folder, "b")
        start = time.monotonic()
        assert b.wait_for_end() == StatusCode.UNAUTHENTICATED
        assert time.monotonic() - start < 2  # a beat takes 0.25 s
        assert server.status().clients == 1 and not server.status().caches
        assert "its certificate is no longer trusted" in caplog.text
        assert b.ask(pack(REQUEST)) == StatusCode.UNAUTHENTICATED
        assert b.free(1) == StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match="not trusted"):
            b.status()
        with pytest.raises(grpc.RpcError, match="not trusted"):
            Client(server.address, keys["b"])
        assert same(a.ask(pack(REQUEST)), REQUEST)


def test_revocation_ends_calls_that_run(folder, keys, monkeypatch):
    """Calls that receive, wait, or are computed; others of another name go on."""
    gate, ended = Gate(monkeypatch), threading.Event()
    with (
        serving(folder) as server,
        Client(server.address, keys["a"]) as a,
        Client(server.address, keys["b"]) as b,
    ):
        packed = pack(REQUEST)
        own = a.begin(packed)
        computing = b.begin(packed)
        wait_until(lambda: len(gate.calls) == 2)
        waiting = b.begin(packed)
        wait_until(lambda: server.status().waiting == 1)

        def stalls():
            yield b.version.request(packed.header(b.session))
            ended.wait(60)

        receiving = b.compute(stalls())
        held = server._service.account._held
        size = sum(packed.form.request.sizes) + sum(packed.form.result.sizes)
        wait_until(lambda: held["b"] == 3 * size)
        revoke(folder, "b")
        start = time.monotonic()
        assert b.wait_for_end() == StatusCode.UNAUTHENTICATED
        for call in (waiting, receiving):
            assert b.hear(call, packed) == StatusCode.FAILED_PRECONDITION
        assert time.monotonic() - start < 2
        wait_until(lambda: held["b"] == size)
        gate.open.set()
        assert b.hear(computing, packed) == StatusCode.FAILED_PRECONDITION
        wait_until(lambda: not held["b"])
        assert same(a.hear(own, packed), REQUEST)
        ended.set()


def test_a_client_that_takes_no_events_is_cut_too(folder, keys, monkeypatch):
    """It gives the events of its session no room, so that the server waits to write one."""
    with (
        serving(folder) as server,
        Client(server.address, keys["b"]) as b,
        contextlib.closing(Open(b)) as call,
    ):
        call.send()
        assert call.hear()
        writing = threading.Event()

        def large(version, session):
            writing.set()
            return version.messages.ServerState.FromString(joined(b"", [bytes(2**21)]))

        monkeypatch.setattr(server._service, "_state", large)
        assert writing.wait(20)
        time.sleep(1)  # until no more events fit into the connection
        assert server.status().clients == 1
        revoke(folder, "b")
        start = time.monotonic()
        wait_until(lambda: not server.status().clients)
        assert time.monotonic() - start < 2  # a beat takes 0.25 s, and `idle` is 10 s
        call.send()
        with pytest.raises(grpc.RpcError, match="session: it has ended"):
            next(call.call)


def test_a_revoked_certificate_has_no_task_in_an_open_call(folder, keys, monkeypatch):
    """Although the session of the call goes on: it may have another certificate of the name."""
    with (
        serving(folder) as server,
        Client(server.address, keys["b"]) as b,
        contextlib.closing(Open(b)) as call,
    ):
        call.send()
        assert call.hear()
        monkeypatch.setattr(server._service, "end_untrusted", lambda: None)
        revoke(folder, "b")
        wait_until(lambda: b.free(1) == StatusCode.UNAUTHENTICATED)
        call.send()
        with pytest.raises(grpc.RpcError, match="no longer trusted"):
            next(call.call)
        assert call.call.code() == StatusCode.UNAUTHENTICATED


def test_certificates_are_rotated_without_a_lost_task(folder):
    with serving(folder) as server:
        old = folder / "clients" / "a"
        with connect(server.address, keys=old, home=False) as first:
            assert same(first.submit(REQUEST).result(20), REQUEST)
            rotate(folder)
            with connect(server.address, keys=old, home=False) as second:
                for pool in (first, second):
                    assert same(pool.submit(REQUEST).result(20), REQUEST)


def test_a_server_that_crashed_is_started_again(tmp_path):
    """A supervisor starts it at the same address; no bit of the answers changes."""
    address = f"ipc://{tmp_path}/s"
    server = ServerProcess(address)
    try:
        assert server.address
        with connect(address, home=False) as pool:
            assert same(pool.submit(REQUEST).result(20), REQUEST)
            server.signal("SIGSEGV")
            server.process.join(20)
            future = pool.submit(REQUEST)
            server = ServerProcess(address)
            assert server.address
            assert same(future.result(20), REQUEST)
    finally:
        server.end()
