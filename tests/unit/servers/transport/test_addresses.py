"""gRPC's names of addresses, each with a real server and a real channel."""

import asyncio

import grpc
import pytest

from seqpar.servers.transport.addresses import (
    bind_target,
    bound,
    check_keys,
    host_and_port,
    is_local,
    path_of,
    target,
)
from seqpar.servers.transport.routes import Route
from seqpar.servers.transport.unix_sockets import binding
from tests.support.grpc_echo import call, echo_server


async def _reached(address):
    async with echo_server(address) as served:
        route = Route(served, has_keys=False)
        try:
            return served, await call(route.target)
        finally:
            route.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]"])
def test_loopback_addresses(host):
    served, answer = asyncio.run(_reached(f"tcp://{host}:*"))
    assert answer == "here"
    assert served.startswith(f"tcp://{host}:") and host_and_port(served)[1] > 0


# gRPC decodes %41, and takes what follows a comma for another address.
@pytest.mark.parametrize("name", ["s", "a b", "a%41", "q?x", "h#x", "c,d", "ü"])
def test_paths_of_unix_sockets(tmp_path, name):
    async def reached():
        address = f"ipc://{tmp_path}/{name}"
        with binding(path_of(address)) as lock:
            answers = echo_server(address)
            served = await answers.__aenter__()
        assert {x.name for x in tmp_path.iterdir()} == {name, f"{name}.lock"}
        route = Route(served, has_keys=False)
        answer = await call(route.target)
        route.close()
        await answers.__aexit__(None, None, None)
        lock.free()
        return served == address, answer

    assert asyncio.run(reached()) == (True, "here")
    assert not list(tmp_path.iterdir())


def test_a_wildcard_takes_both_families():
    async def reached():
        async with echo_server("tcp://*:*") as served:
            hosts = ["127.0.0.1", "[::1]"]
            port = host_and_port(served)[1]
            return [await call(target(f"tcp://{host}:{port}")) for host in hosts]

    assert asyncio.run(reached()) == ["here", "here"]


@pytest.mark.parametrize(("address", "server", "client"), [
    ("tcp://10.0.0.1:5", "10.0.0.1:5", "dns:///10.0.0.1:5"),
    ("tcp://[fe80::1]:5", "[fe80::1]:5", "dns:///[fe80::1]:5"),
    ("tcp://[::ffff:7f00:1]:5", "127.0.0.1:5", "dns:///127.0.0.1:5"),
    ("tcp://unix:5", "unix:5", "dns:///unix:5"),
    ("tcp://localhost:5", "127.0.0.1:5", "dns:///127.0.0.1:5"),
])  # fmt: skip
def test_names_of_tcp_addresses(address, server, client):
    assert (bind_target(address), target(address)) == (server, client)


def test_the_port_that_was_got():
    assert bound("tcp://[::1]:*", 7) == "tcp://[::1]:7"
    assert bound("ipc:///tmp/a:b/s", 1) == "ipc:///tmp/a:b/s"


def test_addresses_that_need_no_keys():
    local = ["127.0.0.1", "127.9.9.9", "localhost", "[::1]", "[::ffff:7f00:1]"]
    assert all(is_local(f"tcp://{host}:5") for host in local)
    others = ["10.0.0.1", "0.0.0.0", "*", "[::]", "[::ffff:a00:1]", "127.1", "localhost.example"]
    assert not any(is_local(f"tcp://{host}:5") for host in others)
    with pytest.raises(ValueError, match="needs keys"):
        check_keys("address", "tcp://10.0.0.1:5", None)


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    async def reached():
        async with echo_server("tcp://127.0.0.1:*") as served:
            answer = await call(target(served))
            with pytest.raises(grpc.aio.AioRpcError):
                await call(target(served), options=())
            return answer

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert asyncio.run(reached()) == "here"
