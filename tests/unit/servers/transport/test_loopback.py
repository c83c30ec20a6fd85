"""Loopback addresses without keys, between processes of two users."""

import asyncio
import os
import socket

import pytest

from seqpar.servers.transport import loopback
from seqpar.servers.transport.loopback import hold_port, sole_server, user_of
from seqpar.servers.transport.routes import Route
from seqpar.servers.wire.versions import VERSIONS
from tests.support.grpc_echo import call, echo_server
from tests.support.other_user import NOBODY, as_root, python_of_nobody
from tests.support.servers import running

LISTEN = """
for host, only6 in (("127.0.0.1", None), ("0.0.0.0", None), ("::", 0)):
    for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (2, 15)):
        with socket.socket(socket.AF_INET if only6 is None else socket.AF_INET6) as listener:
            if only6 is not None:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only6)
            for option in options:
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                listener.bind((host, int(sys.argv[1])))
                listener.listen()
                print(host, options)
            except OSError:
                pass
"""
CONNECT = """
client = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
sys.stdin.readline()
client.close()
print("closed", flush=True)
sys.stdin.readline()
"""
WAIT = """
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
"""


def listens(port):
    """How another user's process manages to listen there."""
    with python_of_nobody(LISTEN, port) as other:
        return other.communicate()[0].splitlines()


@as_root
def test_no_other_user_takes_the_place_of_a_server():
    """A channel connects again by itself, so the port stays held after its server has left."""

    async def outcomes():
        async with echo_server("tcp://127.0.0.1:*") as served:
            route, port = Route(served, has_keys=False), int(served.rpartition(":")[2])
            assert await call(route.target) == "here"
            while_served = listens(port)
        after = listens(port)
        async with echo_server(served):
            assert await call(route.target) == "here"
        route.close()
        return while_served, after, listens(port)

    while_served, after, control = asyncio.run(outcomes())
    assert not while_served and not after and control


@as_root
def test_another_users_server_is_refused():
    with python_of_nobody(WAIT) as other:
        address = f"tcp://127.0.0.1:{int(other.stdout.readline())}"
        with pytest.raises(OSError, match=r"another user .* use a Unix socket"):
            Route(address, has_keys=False)
        Route(address, has_keys=True).close()  # TLS finds out who that is


def test_holding_a_port_awaits_a_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with hold_port(address), hold_port(address):  # of two pools

        async def reached():
            async with echo_server(address) as served:
                return served, await call(f"dns:///{address.removeprefix('tcp://')}")

        assert asyncio.run(reached()) == (address, "here")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_server_knows_the_user_of_a_call(host):
    async def user():
        async with echo_server(f"tcp://{host}:*", lambda context: context.peer()) as served:
            route, users = Route(served, has_keys=False), []
            async with echo_server(
                f"tcp://{host}:*", lambda context: user_of(context.peer(), other)
            ) as other:
                second = Route(other, has_keys=False)
                users = [await call(second.target), user_of(await call(route.target), other)]
                second.close()
            route.close()
            return users

    # The second call went to another server, so it is no connection of this one.
    assert asyncio.run(user()) == [str(os.geteuid()), None]


@as_root
@pytest.mark.parametrize(("host", "dialled", "peer"), [
    ("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:"),
    ("127.0.0.1", "::ffff:127.0.0.1", "ipv4:127.0.0.1:"),
    ("::1", "::1", "ipv6:%5B::1%5D:"),
])  # fmt: skip
def test_another_users_connection_is_known(host, dialled, peer):
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        address = f"tcp://[{host}]:{port}"
        with python_of_nobody(CONNECT, dialled, port) as other:
            assert other.stdout.readline() == "connected\n"
            connection, client = server.accept()
            assert user_of(f"{peer}{client[1]}", address) == NOBODY
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "closed\n"
            # What it has sent can still be read. The kernel lists what is left as root's.
            assert user_of(f"{peer}{client[1]}", address) is None
            connection.close()


ASK = """
with grpc.insecure_channel(sys.argv[1]) as channel:
    for call in ("Status", "Session"):
        try:
            one = channel.unary_stream(f"/{service}/{call}")(b"", timeout=20)
            print(call, len(next(one)) > 0)
        except grpc.RpcError as error:
            print(call, error.code().name, error.details())
"""


@as_root
def test_another_user_cannot_use_a_server():
    first = f"import grpc, grpc._channel; service = {VERSIONS[0].service!r}\n"
    with running("tcp://127.0.0.1:*") as server:
        target = server.address.removeprefix("tcp://")
        with python_of_nobody(ASK, target, first=first) as other:
            refused = other.communicate()[0].splitlines()
        with python_of_nobody("", target, first=first + ASK) as own:  # before it is nobody's
            served = own.communicate()[0].splitlines()
    reason = "UNAUTHENTICATED without keys, a server on TCP serves only its own user"
    assert refused == [f"Status {reason}", f"Session {reason}"]
    assert served == ["Status True", "Session True"]


def test_sockets_that_no_process_connected_are_nobodys():
    """The kernel answers with a listening socket, and lists one that is not accepted as root's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert user_of(f"ipv4:127.0.0.1:{port}", "tcp://127.0.0.1:5") is None
        with socket.create_connection(("127.0.0.1", port)) as client:
            there = f"tcp://127.0.0.1:{client.getsockname()[1]}"
            assert user_of(f"ipv4:127.0.0.1:{port}", there) is None
            listener.accept()[0].close()


@pytest.mark.parametrize("peer", ["unix:", "ipv4:127.0.0.1", "ipv4:127.0.0.1:99999", "ipv6:[x]:1"])
def test_odd_peers_are_nobody(peer):
    assert user_of(peer, "tcp://127.0.0.1:5") is None


def test_a_second_server_is_refused():
    address = "tcp://127.0.0.1:5"
    with sole_server(address), pytest.raises(OSError, match="another server listens there"):
        sole_server(address)
    with sole_server(address), sole_server("tcp://127.0.0.1:6"):
        pass


def test_a_system_that_does_not_know_users_is_refused(monkeypatch):
    monkeypatch.setattr(loopback, "_BY_FAMILY", 19)  # an unknown message
    with pytest.raises(OSError, match="does not tell which user connects: use a Unix socket"):
        sole_server("tcp://127.0.0.1:5")
