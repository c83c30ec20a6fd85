"""What a pool does when its sessions end, or seem to end."""

import time

from seqpar.servers.pool import connection
from seqpar.servers.transport.authority import generate
from seqpar.servers.transport.certificates import ServerIdentity
from tests.support.requests import random_request
from tests.support.servers import connect, running, same, wait_until

REQUEST = random_request(1)


def test_a_cache_that_is_freed_as_its_server_leaves_does_no_harm(tmp_path):
    with (
        running(f"ipc://{tmp_path}/s") as server,
        running(f"ipc://{tmp_path}/t") as other,
        connect(server.address, other.address, home=False) as pool,
    ):
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        dispatcher = pool.dispatcher()
        leaving = dispatcher.servers.get(server.address)
        dispatcher.inbox.call(lambda: (leaving.forget(1), leaving.distrust("it leaves")))
        assert same(pool.submit(REQUEST).result(20), REQUEST)
        time.sleep(0.1)  # for what the connection has begun
        assert dispatcher.inbox.ended is None
        assert same(pool.submit(REQUEST).result(20), REQUEST)


def test_a_pool_reports_faults_of_its_keys(tmp_path, caplog):
    generate(tmp_path / "keys")
    (tmp_path / "keys" / "authorities" / "note.txt").touch()
    with (
        running("tcp://127.0.0.1:*", keys=ServerIdentity(tmp_path / "keys")) as server,
        connect(server.address, keys=tmp_path / "keys", home=False) as pool,
    ):
        assert same(pool.submit(REQUEST).result(20), REQUEST)
    assert any(
        "note.txt is ignored" in x.getMessage() for x in caplog.records if x.name == "seqpar"
    )


def test_a_session_that_fails_in_an_unexpected_way_begins_again(tmp_path, monkeypatch):
    attempts, route = [], connection.Route

    def fails_once(*arguments):
        attempts.append(arguments)
        if len(attempts) == 1:
            raise KeyError("nobody expects this")
        return route(*arguments)

    monkeypatch.setattr(connection, "Route", fails_once)
    with (
        running(f"ipc://{tmp_path}/s") as server,
        connect(server.address, home=False) as pool,
    ):
        assert same(pool.submit(REQUEST).result(20), REQUEST)
    assert len(attempts) > 1
