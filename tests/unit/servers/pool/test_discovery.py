"""Where a pool finds servers, and the arguments that say so."""

import pytest

from seqpar.servers.pool import discovery
from seqpar.servers.pool.pool import ServerPool
from tests.support.requests import random_request
from tests.support.servers import connect, running, same, wait_until

REQUESTS = [random_request(i, 8 + i % 3, 16) for i in range(12)]


@pytest.fixture
def addresses(tmp_path):
    """Addresses that are free."""
    return [f"ipc://{tmp_path}/{i}" for i in range(3)]


def all_right(pool):
    futures = [pool.submit(request) for request in REQUESTS]
    return all(same(x.result(20), request) for x, request in zip(futures, REQUESTS, strict=True))


def tasks(pool):
    """How many tasks each server computed, and home."""
    return [x.tasks for x in pool.report().servers]


def test_joining_servers_work_and_leaving_ones_finish(addresses, tmp_path):
    listed = tmp_path / "servers"
    listed.write_text(f"{addresses[0]}\n")
    with running(addresses[0]) as first, connect(f"file://{listed}", home=False) as pool:
        assert all_right(pool) and tasks(pool) == [12, 0]
        with running(addresses[1]):
            listed.write_text("\n".join(addresses[:2]))
            pool._dispatcher.discovery.look()
            wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
            while min(tasks(pool)[:2]) < 13:
                assert all_right(pool)
            first.stop()
            assert all_right(pool)
            wait_until(lambda: pool.report().servers[0].state == "connecting")
            assert all_right(pool)
        listed.write_text("garbage")  # somebody is writing it
        pool._dispatcher.discovery.look()
        assert len(pool.report().servers) == 3
        listed.write_text(addresses[1])
        pool._dispatcher.discovery.look()
        wait_until(lambda: len(pool.report().servers) == 2)


def test_remote_listed_servers_need_keys(addresses, tmp_path):
    listed = tmp_path / "servers"
    listed.write_text(f"tcp://10.0.0.1:5\n{addresses[0]}\ntcp://127.0.0.1:1")
    with connect(f"file://{listed}", deadlines={"connect": 0.05}) as pool:
        found = [x.address for x in pool.report().servers]
        assert found == [addresses[0], "tcp://127.0.0.1:1", "home"]


def test_a_name_stands_for_all_its_addresses(monkeypatch):
    infos = [(0, 0, 0, "", ("127.0.0.2", 7)), (0, 0, 0, "", ("::1", 7, 0, 0))] * 2
    monkeypatch.setattr(discovery.socket, "getaddrinfo", lambda *_, **__: infos)
    assert discovery.expand(["dns://attention:7"]) == ["tcp://127.0.0.2:7", "tcp://[::1]:7"]
    assert discovery.expand(["file:///nonexistent"]) is None


@pytest.mark.parametrize(("addresses", "options", "said"), [
    ([], {}, "^addresses must"), (5, {}, "^addresses must"), ([5], {}, r"^addresses\[0\] must"),
    ("tcp://*:5", {}, r"^addresses\[0\] must name the host"),
    ("tcp://127.0.0.1:*", {}, r"^addresses\[0\] must name the host"),
    ("tcp://127.0.0.1:0", {}, r"^addresses\[0\] must name the host"),
    *((f"dns://localhost:{x}", {}, r"^addresses\[0\] must") for x in (0, 99999, "9" * 20, "5\n")),
    (["tcp://10.0.0.1:5"], {}, r"^addresses\[0\]: .* keys"), ("dns://host:5", {}, "keys"),
    ("ipc:///s", {"transports": ["rdma"]}, "^transports must"),
    ("ipc:///s", {"transports": "zmq"}, "^transports must"),
    ("ipc:///s", {"deadlines": {"connect": 50}}, "^request"),
    ("ipc:///s", {"deadlines": {"patience": 50}}, "^deadlines must be among"),
    ("ipc:///s", {"hedge_quantile": 0}, "^hedge_quantile"),
    ("ipc:///s", {"sample": -1}, "^sample"),
    ("ipc:///s", {"depth": 0}, "^depth"), ("ipc:///s", {"home": 1}, "^home"),
    ("ipc:///s", {"home_depth": -1}, "^home_depth"),
    ("ipc:///s", {"keys": "/nonexistent"}, "^keys: /nonexistent/client.public"),
])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(addresses, options, said):
    with pytest.raises(ValueError, match=said):
        ServerPool.connect(addresses, **options)
