"""Where a pool finds servers, and the arguments that say so."""

import os

import pytest

from seqpar.servers.pool import discovery
from seqpar.servers.pool.pool import ServerPool
from tests.support.other_user import NOBODY, as_root
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
    with pytest.raises(OSError, match="/nonexistent"):
        discovery.expand(["file:///nonexistent"])


def _write_for_all(path):
    path.chmod(0o666)


def _give_away(path):
    os.chown(path, NOBODY, NOBODY)


def _make_fifo(path):
    path.unlink()
    os.mkfifo(path)


def _make_folder(path):
    path.unlink()
    path.mkdir()


def _link_to(path):
    """A link of this user, through a folder that others may write to."""
    open_folder, file = path.parent / "open", path.parent / "file"
    path.rename(file)
    open_folder.mkdir()
    open_folder.chmod(0o777)
    (open_folder / "link").symlink_to(file)
    path.symlink_to(open_folder / "link")


FAULTS = {
    "may be written to by other users": _write_for_all,
    "list may be written to by other users": lambda path: path.chmod(0o622),
    "folder may be written to by other users": lambda path: path.parent.chmod(0o777),
    "open may be written to by other users": _link_to,
    "belongs to another user": _give_away,
    "folder belongs to another user": lambda path: _give_away(path.parent),
    "must be a regular file": _make_fifo,
    "list must be a regular file": _make_folder,
}


@pytest.fixture
def listed(tmp_path):
    """A list of one server, which does not exist."""
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "list"
    path.write_text("tcp://127.0.0.1:1")
    return path


@pytest.mark.parametrize("fault", [
    pytest.param(name, marks=as_root if "belongs" in name else ()) for name in FAULTS
])  # fmt: skip
def test_a_list_that_others_could_write_is_refused(listed, fault):
    assert discovery.parse(f"file://{listed}") == [f"file://{listed}"]
    FAULTS[fault](listed)
    with pytest.raises(ValueError, match=rf"^addresses\[0\]: .*{fault}"):
        ServerPool.connect(f"file://{listed}")


@pytest.mark.parametrize("fault", [
    pytest.param(name, marks=as_root if "belongs" in name else ()) for name in FAULTS
])  # fmt: skip
def test_a_list_that_others_could_write_is_not_read_again(listed, fault, caplog):
    seen = []
    watching = discovery.Discovery([f"file://{listed}"], False, seen.append)
    listed.write_text("tcp://127.0.0.1:2")
    watching.look()
    assert seen == [["tcp://127.0.0.1:1"], ["tcp://127.0.0.1:2"]] and not caplog.records
    listed.write_text("tcp://127.0.0.1:3")
    FAULTS[fault](listed)
    watching.look()
    watching.look()
    assert len(seen) == 2 and len(caplog.records) == 1
    assert fault in caplog.text and "a different user could have written" in caplog.text


def test_a_fault_that_comes_again_is_logged_again(listed, caplog):
    seen = []
    watching = discovery.Discovery([f"file://{listed}"], False, seen.append)
    for _ in range(2):
        listed.chmod(0o666)
        watching.look()
        listed.chmod(0o600)
        watching.look()
    assert len(caplog.records) == 2 and len(seen) == 1


@pytest.mark.parametrize(("addresses", "options", "said"), [
    ([], {}, "^addresses must"), (5, {}, "^addresses must"), ([5], {}, r"^addresses\[0\] must"),
    ("ipc:///s", {}, r"^addresses\[0\] must be in a folder below /, got ipc:///s: is a variable"),
    ("tcp://*:5", {}, r"^addresses\[0\] must name the host"),
    ("tcp://127.0.0.1:*", {}, r"^addresses\[0\] must name the host"),
    ("tcp://127.0.0.1:0", {}, r"^addresses\[0\] must name the host"),
    *((f"dns://localhost:{x}", {}, r"^addresses\[0\] must") for x in (0, 99999, "9" * 20, "5\n")),
    (["tcp://10.0.0.1:5"], {}, r"^addresses\[0\]: .* keys"), ("dns://host:5", {}, "keys"),
    ("ipc:///tmp/s", {"transports": ["rdma"]}, "^transports must"),
    ("ipc:///tmp/s", {"transports": "grpc"}, "^transports must"),
    ("ipc:///tmp/s", {"deadlines": {"connect": 50}}, "^request"),
    ("ipc:///tmp/s", {"deadlines": {"patience": 50}}, "^deadlines must have names among"),
    ("ipc:///tmp/s", {"hedge_quantile": 0}, "^hedge_quantile"),
    ("ipc:///tmp/s", {"sample": -1}, "^sample"),
    ("ipc:///tmp/s", {"depth": 0}, "^depth"), ("ipc:///tmp/s", {"home": 1}, "^home"),
    ("ipc:///tmp/s", {"home_depth": -1}, "^home_depth"),
    ("ipc:///tmp/s", {"keys": "/nonexistent"}, "^keys: /nonexistent/client.crt"),
])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(addresses, options, said):
    with pytest.raises(ValueError, match=said):
        ServerPool.connect(addresses, **options)
