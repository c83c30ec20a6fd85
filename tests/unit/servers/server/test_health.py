"""The standard health service tells whether a server accepts requests, also where TLS cannot be."""

import contextlib
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seqpar.__main__ import main
from seqpar.servers.server import health
from seqpar.servers.server.server import Server
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.versions import VERSIONS
from tests.support.faults import LIMIT
from tests.support.requests import random_request
from tests.support.servers import Client, Gate, running, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ["", *(version.service for version in VERSIONS)]


def free_port():
    """A port of the loopback address that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check(channel, name=""):
    """What a server says of a service."""
    request = health_pb2.HealthCheckRequest(service=name)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT, wait_for_ready=True)
    return answer.status


@contextlib.contextmanager
def serving(tmp_path):
    """A server, and channels to its Unix socket and to its port for probes."""
    port, path = free_port(), tmp_path / "server"
    with (
        running(f"ipc://{path}", health=("127.0.0.1", port)) as server,
        grpc.insecure_channel(f"unix:{path}") as own,
        grpc.insecure_channel(f"127.0.0.1:{port}") as probe,
    ):
        yield server, own, probe


@pytest.mark.parametrize("name", NAMES, ids=["server", *NAMES[1:]])
def test_a_server_is_healthy_on_both_ports(tmp_path, name):
    with serving(tmp_path) as (_, own, probe):
        assert check(own, name) == check(probe, name) == SERVING


def test_a_service_of_another_name_is_unknown(tmp_path):
    with serving(tmp_path) as (_, _, probe):
        with pytest.raises(grpc.RpcError) as caught:
            check(probe, "seqpar.attention.v0.Attention")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_draining_server_is_not_healthy(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with serving(tmp_path) as (server, own, probe):
        client, packed = Client(server.address), pack(random_request(0))
        call = client.begin(packed)
        assert gate.begun.wait(LIMIT)
        watched = health_pb2_grpc.HealthStub(probe).Watch(
            health_pb2.HealthCheckRequest(), timeout=LIMIT
        )
        assert next(watched).status == SERVING
        server.stop()
        assert next(watched).status == NOT_SERVING
        assert {check(channel, name) for channel in (own, probe) for name in NAMES} == {NOT_SERVING}
        gate.open.set()
        assert not isinstance(client.hear(call, packed), grpc.StatusCode)  # it was answered


def code_of(channel, name):
    """The status code of a call of the service without a message in it."""
    call = channel.stream_stream(f"/{VERSIONS[0].service}/{name}")(iter([b""]), timeout=LIMIT)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code()


def test_the_second_port_serves_only_health(tmp_path):
    with serving(tmp_path) as (_, own, probe):
        for name in ("Session", "Compute", "Free", "Status"):
            assert code_of(probe, name) == grpc.StatusCode.UNIMPLEMENTED
        assert code_of(own, "Status") == grpc.StatusCode.OK


def test_calls_of_the_second_port_end_in_time(tmp_path, monkeypatch):
    """Else strangers who watch could take all its calls for ever."""
    short = {"grpc.max_connection_age_ms": 100, "grpc.max_connection_age_grace_ms": 100}
    assert short.keys() <= dict(health._OPTIONS).keys()
    monkeypatch.setattr(health, "_OPTIONS", list((dict(health._OPTIONS) | short).items()))
    with serving(tmp_path) as (_, _, probe):
        watched = health_pb2_grpc.HealthStub(probe).Watch(
            health_pb2.HealthCheckRequest(), timeout=LIMIT
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(watched)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert check(probe) == SERVING


def test_a_taken_port_is_named_and_frees_the_address(tmp_path):
    address = f"ipc://{tmp_path}/server"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = taken.getsockname()
        with pytest.raises(ValueError, match=f"health: 127.0.0.1:{place[1]} cannot be bound"):
            Server(address, health=place)
    with running(address, health=place), grpc.insecure_channel(f"127.0.0.1:{place[1]}") as probe:
        assert check(probe) == SERVING


@pytest.mark.parametrize("place", ["x", "0", "-1", "65536", "host:", "9" * 9, "\u0663", ""])
def test_a_place_that_is_none_is_refused(place, capsys):
    assert main(["serve", "--bind", "ipc:///tmp/s", "--health", place]) == 2
    assert "serve: health must be PORT or HOST:PORT" in capsys.readouterr().err


def test_a_client_that_watches_has_a_call(tmp_path):
    with serving(tmp_path) as (server, own, _):
        calls = server._service._calls
        watch = health_pb2_grpc.HealthStub(own).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        assert calls.held == 1
        watch.cancel()
        wait_until(lambda: calls.held == 0)
