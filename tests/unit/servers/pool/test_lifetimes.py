"""Pools that end, and that do not: at exit, in a fork, beside each other, and without servers."""

import copy
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from seqpar import DisaggregatedAttention
from seqpar.servers.wire import attention_pb2, versions
from seqpar.servers.wire.request import ServersError
from seqpar.servers.wire.versions import Version
from tests.support.faults import LIMIT
from tests.support.requests import random_request
from tests.support.servers import Gate, connect, running, same
from tests.support.tiers import quickly

REQUESTS = [random_request(i, 16, 16) for i in range(6)]
ROOT = Path(__file__).parents[4]


class OtherVersion(Version):
    """The messages of version 1 under another name."""

    def __init__(self, name):
        super().__init__(attention_pb2)
        self.service = name


NEW, OLD, ANCIENT = map(
    OtherVersion, ("test.v3.Attention", "test.v2.Attention", "test.v1.Attention")
)


def ended(program, address):
    """Run a program with a pool; return its standard error when it has ended by itself."""
    head = """
        import sys
        from tests.support.requests import random_request
        from tests.support.servers import connect, same
        requests = [random_request(i, 16, 16) for i in range(6)]
        pool = connect(sys.argv[1], home=HOME)
        """
    home, program = program
    text = textwrap.dedent(head.replace("HOME", str(home))) + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", text, address],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    return [x for x in lines if not x.startswith(("I0", "I1", "W0", "W1", "E0", "E1"))]


PROGRAMS = {
    "idle": (False, "assert same(pool.submit(requests[0]).result(60), requests[0])"),
    "with work on its way": (False, "futures = [pool.submit(request) for request in requests]"),
    "with work of another thread": (
        False,
        """
        import threading
        future = pool.submit(requests[0])
        threading.Thread(target=future.exception, daemon=True).start()
        """,
    ),
    "without a server": (True, "futures = [pool.submit(request) for request in requests]"),
    "after a fork": (
        False,
        """
        import os
        from seqpar import ServersError
        if os.fork():
            assert os.wait()[1] == 0
            assert same(pool.submit(requests[0]).result(60), requests[0])
        else:
            try:
                pool.submit(requests[0])
            except ServersError as error:
                assert "made by a different process" in str(error)
            pool.close()
            try:
                connect(sys.argv[1])
            except ServersError as error:
                assert "was forked" in str(error)
                os._exit(0)
            os._exit(1)
        """,
    ),
}


@pytest.mark.parametrize("name", quickly(*PROGRAMS))
def test_a_process_with_an_open_pool_ends_quietly(tmp_path, monkeypatch, name):
    if "on its way" in name or "another thread" in name:
        Gate(monkeypatch)  # which stays closed for 20 s
    address = f"ipc://{tmp_path}/s"
    if name == "without a server":
        assert ended(PROGRAMS[name], address) == []
        return
    with running(address):
        assert ended(PROGRAMS[name], address) == []


def test_two_pools_of_a_process_do_not_disturb_each_other(tmp_path, monkeypatch):
    """One is closed while it waits for results, the other one goes on."""
    gate = Gate(monkeypatch)
    with (
        running(f"ipc://{tmp_path}/0") as first,
        running(f"ipc://{tmp_path}/1") as second,
        connect(first.address, second.address, home=False) as kept,
    ):
        closed = connect(first.address, second.address, home=False)
        futures = [[pool.submit(x) for x in REQUESTS] for pool in (closed, kept)]
        assert gate.begun.wait(10)
        closed.close()
        gate.open.set()
        for future in futures[0]:
            with pytest.raises(ServersError, match="closed"):
                future.result(1)
        assert all(same(x.result(20), r) for x, r in zip(futures[1], REQUESTS, strict=True))
        assert all(x.lost == 0 for x in kept.report().servers)


def test_a_server_may_start_after_its_pool(tmp_path):
    with connect(f"ipc://{tmp_path}/s", home=False, deadlines={"connect": 0.1}) as pool:
        futures = [pool.submit(request) for request in REQUESTS]
        time.sleep(0.5)
        assert "No such file" in pool.report().servers[0].reason
        with running(f"ipc://{tmp_path}/s"):
            assert all(same(x.result(20), r) for x, r in zip(futures, REQUESTS, strict=True))


def test_copies_of_a_pool_are_the_pool(tmp_path):
    with running(f"ipc://{tmp_path}/s") as server, connect(server.address) as pool:
        assert copy.deepcopy(pool) is pool
        model = torch.nn.Sequential(DisaggregatedAttention(pool))
        assert copy.deepcopy(model)[0]._bound.comm is model[0]._bound.comm


@pytest.mark.parametrize(
    ("of_server", "of_pool", "used"),
    [([NEW, OLD], [NEW, OLD], NEW), ([OLD, ANCIENT], [NEW, OLD], OLD), ([NEW, OLD], [OLD], OLD)],
)
def test_a_pool_uses_the_newest_version_of_both(tmp_path, monkeypatch, of_server, of_pool, used):
    monkeypatch.setattr(versions, "VERSIONS", of_server)
    with running(f"ipc://{tmp_path}/s") as server:
        monkeypatch.setattr(versions, "VERSIONS", of_pool)
        with connect(server.address, home=False) as pool:
            assert same(pool.submit(REQUESTS[0]).result(20), REQUESTS[0])
            (connection,) = pool._dispatcher.servers
            assert connection._service is used


def test_without_a_common_version_a_server_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "VERSIONS", [NEW, OLD])
    with running(f"ipc://{tmp_path}/s") as server:
        monkeypatch.setattr(versions, "VERSIONS", [ANCIENT])
        with connect(
            server.address, deadlines={"connect": 30, "request": 31, "hedge": 32, "give_up": 33}
        ) as pool:
            assert same(pool.submit(REQUESTS[0]).result(20), REQUESTS[0])
            report = pool.report().servers[0]
            assert report.state == "refused"
            assert report.reason == "version: the server has none of test.v1.Attention"
