"""Servers and trainers that are replaced one after another, with tasks in flight."""

import itertools
import threading

import pytest

from seqpar.servers.wire import versions
from tests.support import second_version
from tests.support.changed import changed
from tests.support.faults import LIMIT
from tests.support.requests import random_request
from tests.support.servers import LONG_DEADLINES, ServerProcess, connect, same, wait_until

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
        with (
            connect(f"file://{fleet.listed}", home=False, deadlines=LONG_DEADLINES) as pool,
            Trainer(pool) as trainer,
        ):
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


def pool_that_speaks(fleet, speaks, **options):
    """A pool of a process that knows these versions of the service."""
    with changed(versions, VERSIONS=speaks()):
        return connect(f"file://{fleet.listed}", deadlines=LONG_DEADLINES, **options)


def spoken(pool, server):
    """The name of the package that a pool and a server speak."""
    service = pool._dispatcher.servers.get(server.address)._service.service
    return service.removeprefix("seqpar.attention.").removesuffix(".Attention")


class Update:
    """Two servers and two trainers, of the first version at first."""

    def __init__(self, fleet):
        self._fleet, self._named = fleet, itertools.count()
        self.servers = [self._serve(second_version.first, "1.0") for _ in range(2)]
        self.trainers = [self._train(second_version.first) for _ in range(2)]

    def _serve(self, speaks, library):
        name = f"s{next(self._named)}"
        return self._fleet.add(name, slow=0.02, versions=speaks, library=library)

    def _train(self, speaks):
        trainer = Trainer(pool_that_speaks(self._fleet, speaks, home=False))
        trainer.start()
        return trainer

    def update_server(self, i):
        old, self.servers[i] = self.servers[i], self._serve(second_version.both, "2.0")
        self._let_all_train()
        drain(old)
        self._fleet.write([x for x in self._fleet.servers if x.process.is_alive()])
        self._let_all_train()

    def update_trainer(self, i):
        old, self.trainers[i] = self.trainers[i], self._train(second_version.both)
        self._let_all_train()
        self._end(old)
        self._let_all_train()

    def _let_all_train(self):
        for trainer in self.trainers:
            for server in self.servers:
                wait_until(lambda pool=trainer.pool, server=server: is_ready(pool, server))
            trainer.trains()

    def spoken(self):
        return [spoken(trainer.pool, x) for trainer in self.trainers for x in self.servers]

    def _end(self, trainer):
        with trainer.pool:
            trainer.__exit__()
        assert trainer.error is None, trainer.error

    def __enter__(self):
        self._let_all_train()
        return self

    def __exit__(self, *_):
        for trainer in self.trainers:
            self._end(trainer)


@pytest.mark.parametrize("order", ["servers first", "trainers first", "in turn"])
def test_versions_are_updated_in_any_order(tmp_path, order):
    with Fleet(tmp_path) as fleet, Update(fleet) as update:
        assert update.spoken() == ["v1"] * 4
        steps = {
            "servers first": [update.update_server] * 2 + [update.update_trainer] * 2,
            "trainers first": [update.update_trainer] * 2 + [update.update_server] * 2,
            "in turn": [update.update_server, update.update_trainer] * 2,
        }[order]
        for count, step in enumerate(steps):
            step(steps[:count].count(step))
            if count == 1:  # all of one kind, or one of each, is new
                new = {"in turn": ["v2", "v1", "v1", "v1"]}.get(order, ["v1"] * 4)
                assert update.spoken() == new
        assert update.spoken() == ["v2"] * 4
        assert not any(x.lost for t in update.trainers for x in t.pool.report().servers[:2])


def test_a_server_without_a_common_version_is_refused(tmp_path):
    with Fleet(tmp_path) as fleet:
        old, new = fleet.add("old"), fleet.add("new", versions=second_version.second)
        pool = pool_that_speaks(fleet, second_version.first)
        with pool, Trainer(pool) as trainer:
            reason = "version: the server has none of seqpar.attention.v1.Attention"
            wait_until(lambda: found(pool, new).reason == reason)
            wait_until(lambda: is_ready(pool, old))
            trainer.trains()
            assert found(pool, new).state == "refused" and not found(pool, new).tasks
            assert found(pool, old).tasks and not found(pool, old).lost
            drain(old)  # home computes until a trainer of the new version comes
            trainer.trains()
            assert pool.report().servers[-1].tasks and not found(pool, new).tasks
            assert new.process.is_alive()
