"""Servers that are replaced one after another while a trainer uses them."""

import threading

import pytest

import seqpar
from seqpar.servers.wire.protocol import VERSION
from tests.support.faults import LIMIT
from tests.support.requests import random_request
from tests.support.servers import ServerProcess, connect, same, wait_until

pytestmark = pytest.mark.alone
REQUESTS = [random_request(i, 16, 32) for i in range(8)]


class Trainer(threading.Thread):
    """Submits tasks until it is told to end; each must be right, and be computed by a server."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.steps, self.error = pool, 0, None
        self.ended = threading.Event()

    def run(self):
        try:
            while not self.ended.is_set():
                futures = [self.pool.submit(request) for request in REQUESTS]
                for request, future in zip(REQUESTS, futures, strict=True):
                    assert same(future.result(LIMIT), request)
                self.steps += 1
        except BaseException as error:
            self.error = error

    def trains(self):
        """Wait until some steps have begun and ended."""
        before = self.steps
        wait_until(lambda: self.error is not None or self.steps >= before + 2)
        assert self.error is None, self.error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join(LIMIT)


class Fleet:
    """Servers whose addresses are in a file that a pool watches."""

    def __init__(self, folder):
        self.folder, self.listed, self.servers = folder, folder / "servers", []

    def add(self, name, **options):
        server = ServerProcess(f"ipc://{self.folder}/{name}", **options)
        self.servers.append(server)
        assert server.address
        self.write(self.servers)
        return server

    def write(self, servers):
        self.listed.write_text("".join(f"{server.address}\n" for server in servers))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.end()


def found(pool, server):
    """What a pool's report says of a server, or None."""
    pool._dispatcher.discovery.look()  # it would look within two seconds
    return next((x for x in pool.report().servers if x.address == server.address), None)


def is_ready(pool, server):
    report = found(pool, server)
    return report is not None and report.state == "ready"


def drain(server):
    """End a server as whoever runs it does, and wait until it has ended."""
    server.signal("SIGTERM")
    server.process.join(LIMIT)
    assert server.process.exitcode == 0


def test_servers_replaced_in_turn_lose_no_task(tmp_path):
    with Fleet(tmp_path) as fleet:
        old = [fleet.add(f"old{i}", slow=0.02) for i in range(2)]
        with connect(f"file://{fleet.listed}", home=False) as pool, Trainer(pool) as trainer:
            for i, server in enumerate(old):
                trainer.trains()
                new = fleet.add(f"new{i}", slow=0.02)
                wait_until(lambda new=new: is_ready(pool, new))
                drain(server)
                trainer.trains()
                fleet.write([x for x in fleet.servers if x.process.is_alive()])
                wait_until(lambda server=server: found(pool, server) is None)
            wait_until(lambda: all(found(pool, x).tasks for x in fleet.servers[2:]))
            trainer.trains()
            assert not found(pool, fleet.servers[-1]).lost


MISFITS = [
    ({"speaks": VERSION + 1}, [f"speaks {VERSION} of the protocol", f"the peer {VERSION + 1}"]),
    ({"library": "9.9.9"}, ["9.9.9", seqpar.__version__]),
]


@pytest.mark.parametrize(("options", "named"), MISFITS)
def test_a_server_of_another_version_is_refused(tmp_path, options, named):
    with Fleet(tmp_path) as fleet:
        old, new = fleet.add("old"), fleet.add("new", **options)
        with connect(f"file://{fleet.listed}") as pool, Trainer(pool) as trainer:
            wait_until(lambda: all(name in found(pool, new).reason for name in named))
            wait_until(lambda: is_ready(pool, old))
            trainer.trains()
            assert found(pool, new).state != "ready" and not found(pool, new).tasks
            assert found(pool, old).tasks and not found(pool, old).lost
            drain(old)  # home computes until a trainer of the new version comes
            trainer.trains()
            assert pool.report().servers[-1].tasks and not found(pool, new).tasks
            assert new.process.is_alive()
