"""A pool and servers in threads of this process: each task has one result, the right one."""

import concurrent.futures
import dataclasses
import itertools
import sys
import threading
import time

import pytest
import torch

from seqpar.__main__ import main
from seqpar.servers.pool import local_worker
from seqpar.servers.pool.dispatcher import StragglerDetector
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server import compute as computing
from seqpar.servers.server import service, worker
from seqpar.servers.server.compute import hardware_of
from seqpar.servers.transport import one_sided
from seqpar.servers.transport.one_sided import available
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.request import ServersError
from tests.support.cases import assert_right, oracle
from tests.support.requests import CASES, backward, forward, packed, random_request
from tests.support.servers import Gate, Slow, connect, running, same, wait_until

TRANSPORTS = [
    ["grpc"],
    pytest.param(["nixl", "grpc"], marks=pytest.mark.skipif(not available(), reason="needs nixl")),
]
OWN = hardware_of(torch.device("cpu"))
REQUESTS = [random_request(i, 8 + i % 3, 16) for i in range(12)]


@pytest.fixture
def addresses(tmp_path):
    """Addresses that are free."""
    return [f"ipc://{tmp_path}/{i}" for i in range(3)]


def results(pool, requests):
    """The results of requests that are submitted at once."""
    futures = [pool.submit(request) for request in requests]
    return [future.result(20) for future in futures]


def all_right(pool, requests=REQUESTS):
    return all(map(same, results(pool, requests), requests))


def tasks(pool):
    """How many tasks each server computed, and home."""
    return [x.tasks for x in pool.report().servers]


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_results_are_those_of_the_oracle(addresses, transports):
    with (
        running(addresses[0], transports=transports),
        connect(addresses[0], transports=transports, home=False) as pool,
    ):
        assert pool.report().servers[0].transport == transports[0]
        for case in CASES.values():
            out, lse = pool.submit(forward(case)).result(20)
            gradients = pool.submit(backward(case, out, lse)).result(20)
            assert_right(packed(case, [out, lse, *gradients]), oracle(case), case.dtype)
        assert tasks(pool) == [2 * len(CASES), 0]


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_many_trainers_at_once_on_two_servers(addresses, transports):
    def train(pool):
        return all(all_right(pool) for _ in range(3))

    with (
        running(addresses[0], transports=transports),
        running(addresses[1], transports=transports),
        concurrent.futures.ThreadPoolExecutor(3) as threads,
    ):
        pools = [connect(*addresses[:2], transports=transports, home=False) for _ in range(3)]
        for pool in pools:
            wait_until(
                lambda pool=pool: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2
            )
        assert all(threads.map(train, pools))
        for pool in pools:
            shares = [x.share for x in pool.report().servers]
            assert min(shares[:2]) > 0 and sum(shares) == pytest.approx(1)
            pool.close()


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_a_payload_above_an_arena_travels_through_grpc(addresses, transports, monkeypatch):
    monkeypatch.setattr(one_sided, "_MAX_ARENA_BYTES", 2**14)
    small, large = random_request(0, 8, 8), random_request(1, 300, 300)
    with (
        running(addresses[0], transports=transports),
        connect(addresses[0], transports=transports, home=False) as pool,
    ):
        assert all_right(pool, [small, large, small, large])


def test_without_any_server_tasks_are_computed_at_home(addresses):
    with connect(addresses[0], deadlines={"connect": 0.1}) as pool:
        assert all_right(pool)
        assert tasks(pool) == [0, len(REQUESTS)] and pool.report().servers[1].share == 1
        assert "home" in str(pool.report())


def test_no_server_and_no_fallback_raise_clearly(addresses):
    deadlines = {"connect": 0.05, "request": 0.1, "hedge": 0.2, "give_up": 0.3}
    said = r"a task has no result after 0 s: no server was"
    with (
        connect(addresses[0], deadlines=deadlines, home=False) as pool,
        pytest.raises(ServersError, match=said),
    ):
        pool.submit(REQUESTS[0]).result(10)


def test_a_host_without_an_address_is_named_in_the_error(tmp_path):
    assert main(["keygen", str(tmp_path)]) == 0
    deadlines = {"connect": 1.0, "request": 1.2, "hedge": 1.5, "give_up": 2.0}
    options = {"keys": tmp_path, "home": False, "deadlines": deadlines}
    said = r"no server was ready \(tcp://nowhere.invalid:5 is connecting: .*nowhere.invalid"
    with (
        ServerPool.connect("tcp://nowhere.invalid:5", **options) as pool,
        pytest.raises(ServersError, match=said),
    ):
        pool.submit(REQUESTS[0]).result(20)


def test_what_fails_at_home_raises_its_own_error(addresses, monkeypatch):
    def fail(*_):
        raise MemoryError("there is none")

    monkeypatch.setattr(local_worker, "compute", fail)
    with (
        connect(addresses[0], deadlines={"connect": 0.1}) as pool,
        pytest.raises(MemoryError, match="there is none"),
    ):
        pool.submit(REQUESTS[0]).result(10)


def test_a_fault_of_the_pool_ends_all_waits(addresses, monkeypatch, caplog):
    with running(addresses[0]):
        pool = connect(addresses[0])
        monkeypatch.setattr(pool._dispatcher, "_assign", lambda now: 1 // 0)
        with pytest.raises(ServersError, match="the pool has failed: ZeroDivisionError"):
            pool.submit(REQUESTS[0]).result(10)
        with pytest.raises(ServersError, match="the pool has failed: ZeroDivisionError"):
            pool.submit(REQUESTS[0])
        pool.close()
    assert caplog.messages.count("the pool has failed") == 1


def test_a_server_that_comes_back_is_used_again(addresses):
    with connect(addresses[0], deadlines={"connect": 0.1}) as pool:
        for round in range(2):
            with running(addresses[0]):
                wait_until(lambda: pool.report().servers[0].state == "ready")
                assert all_right(pool)
            wait_until(lambda: pool.report().servers[0].state == "connecting")
            assert all_right(pool)
            assert tasks(pool)[0] == 12 * (round + 1)


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_what_a_lost_server_owes_goes_to_another(addresses, monkeypatch, transports):
    gate = Gate(monkeypatch)
    with (
        running(addresses[0], transports=transports),
        running(addresses[1], transports=transports),
        connect(addresses[0], transports=transports, home=False) as pool,
    ):
        futures = [pool.submit(request) for request in REQUESTS]
        assert gate.begun.wait(10)
        pool._dispatcher.serve_at([addresses[1]])
        wait_until(lambda: pool.report().servers[0].address == addresses[1])
        gate.open.set()
        assert all(map(same, [x.result(20) for x in futures], REQUESTS))
        assert tasks(pool) == [len(REQUESTS), 0]


def test_a_server_that_refuses_a_task_as_it_leaves_keeps_the_tasks_it_accepted(
    addresses, monkeypatch
):
    gate = Gate(monkeypatch)
    state = service.Service._state

    def hide_draining(self, *args):
        known = state(self, *args)
        known.draining = False
        return known

    monkeypatch.setattr(service.Service, "_state", hide_draining)  # only the refusal tells the pool
    with running(addresses[0]) as leaving, connect(*addresses[:2], home=False) as pool:
        accepted = pool.submit(REQUESTS[0])
        assert gate.begun.wait(10)
        leaving.stop()
        refused = pool.submit(REQUESTS[1])
        wait_until(lambda: pool.report().servers[0].state == "draining")
        gate.open.set()
        assert same(accepted.result(20), REQUESTS[0]) and tasks(pool)[0] == 1
        with running(addresses[1]):
            assert same(refused.result(20), REQUESTS[1]) and tasks(pool)[1] == 1


def test_a_task_that_fails_goes_to_another_server(addresses, monkeypatch):
    fails = itertools.count()

    def compute(requests, device):
        if next(fails) % 2:
            raise RuntimeError("now and then")
        return computing.compute(requests, device)

    monkeypatch.setattr(worker, "compute", compute)
    with running(addresses[0]), running(addresses[1]), connect(*addresses[:2]) as pool:
        assert all_right(pool)
        report = pool.report()
        assert report.retried and sum(x.tasks for x in report.servers) == len(REQUESTS)


def test_a_task_that_fails_everywhere_falls_back_locally(addresses, monkeypatch):
    def fail(*_):
        raise RuntimeError("always")

    monkeypatch.setattr(worker, "compute", fail)
    with running(addresses[0]), running(addresses[1]):
        with connect(*addresses[:2]) as pool:
            assert all_right(pool) and tasks(pool) == [0, 0, 12]
        with (
            connect(*addresses[:2], home=False) as pool,
            pytest.raises(ServersError, match="the computation failed: RuntimeError"),
        ):
            pool.submit(REQUESTS[0]).result(10)


def test_what_is_above_a_servers_caps_goes_elsewhere(addresses):
    small = Limits(tokens=10)
    with running(addresses[0], limits=small), running(addresses[1]):
        with connect(*addresses[:2], home=False) as pool:
            wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
            assert all_right(pool, [random_request(i, 16, 16) for i in range(4)])
            assert tasks(pool) == [0, 4, 0]
        with connect(addresses[0]) as pool:
            assert all_right(pool, [random_request(0, 16, 16)]) and tasks(pool) == [0, 1]
        deadlines = {"connect": 0.2, "request": 0.3, "hedge": 0.4, "give_up": 0.5}
        with (
            connect(addresses[0], deadlines=deadlines, home=False) as pool,
            pytest.raises(ServersError, match="above the limits of all servers"),
        ):
            pool.submit(random_request(0, 16, 16)).result(10)


def test_servers_handle_ten_times_their_task_limit(addresses):
    small = Limits(tokens=4096, bytes=2**20, requests=2)
    with running(addresses[0], limits=small) as server:
        pools = [connect(addresses[0], depth=8, home=False) for _ in range(10)]
        futures = [(r, pool.submit(r)) for r in REQUESTS for pool in pools]
        assert all(same(future.result(20), request) for request, future in futures)
        assert server.status().tasks == 120 and server.status().waiting == 0
        for pool in pools:
            pool.close()


@pytest.mark.parametrize(
    ("depth", "device", "helps"), [(1, OWN, True), (0, OWN, False), (1, "a GPU", False)]
)
def test_local_computing_helps_unless_forbidden_or_unlike(
    addresses, monkeypatch, depth, device, helps
):
    slow = Slow(monkeypatch, 0.03)
    monkeypatch.setattr(service, "hardware_of", lambda _: device)
    with running(addresses[0]) as server, connect(addresses[0], home_depth=depth) as pool:
        slow.threads = server.threads
        for _ in range(2):
            assert all_right(pool)
        assert tasks(pool)[0] and bool(tasks(pool)[1]) == helps
        assert not pool.report().retried and not pool.report().waiting
        assert pool.report().servers[0].device == device


@pytest.mark.parametrize("other", [OWN, "a GPU"])
def test_the_report_tells_whether_bits_depend_on_servers(addresses, monkeypatch, other):
    devices = itertools.cycle([OWN, other])
    monkeypatch.setattr(service, "hardware_of", lambda _: next(devices))
    with running(addresses[0]), running(addresses[1]), connect(*addresses[:2]) as pool:
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        while not all(tasks(pool)[:2]):
            assert all_right(pool)
        said = f"the last digits depend on who computed: a GPU, {OWN}"
        assert (said in str(pool.report())) == (other != OWN)


def test_stragglers_are_hedged_and_first_replies_count(addresses, monkeypatch):
    slow = Slow(monkeypatch, 1.0)
    deadlines = {"request": 9, "hedge": 10}
    with (
        running(addresses[0]) as first,
        running(addresses[1]),
        connect(*addresses[:2], home=False, deadlines=deadlines) as pool,
    ):
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        for _ in range(4):
            assert all_right(pool)
        slow.threads = first.threads
        start = time.monotonic()
        while not pool.report().hedged:
            assert all_right(pool) and time.monotonic() - start < 20
        slow.threads = ()
        assert all_right(pool) and pool.report().wasted <= pool.report().hedged
        assert sum(tasks(pool)) % len(REQUESTS) == 0  # each was counted once


def test_a_late_reply_is_counted_once(addresses, monkeypatch):
    gate = Gate(monkeypatch)
    deadlines = {"connect": 0.2, "request": 0.3}  # silence counts after a second
    with running(addresses[0]), connect(addresses[0], deadlines=deadlines) as pool:
        future = pool.submit(REQUESTS[0])
        assert same(future.result(10), REQUESTS[0]) and tasks(pool) == [0, 1]
        gate.open.set()
        assert all_right(pool, REQUESTS[:4]) and tasks(pool) == [4, 1]
        wait_until(lambda: not pool.report().waiting)


def test_a_moving_queue_is_not_a_fault(addresses, monkeypatch):
    slow = Slow(monkeypatch, 0.15)
    deadlines = {"connect": 0.3, "request": 0.4, "hedge": 0.5, "give_up": 0.8}
    with (
        running(addresses[0], limits=Limits(tokens=32)) as server,
        connect(addresses[0], deadlines=deadlines) as pool,
    ):
        slow.threads = server.threads
        assert all_right(pool)  # which takes 12 times 0.15 s
        assert tasks(pool) == [12, 0] and not pool.report().retried


def test_waiting_for_long_blames_no_server(addresses, monkeypatch):
    gate, within = Gate(monkeypatch), ServerDeadlines(request=0.1)
    requests = [random_request(i, 1024, 1024) for i in range(2)]
    with (
        running(addresses[0], deadlines=within),
        connect(addresses[0], home=False, deadlines={"request": 9.0}) as pool,
    ):
        futures = [pool.submit(request) for request in requests]
        wait_until(lambda: pool.report().retried > 3)  # after three failures a task is given up
        gate.open.set()
        assert all(same(x.result(20), r) for x, r in zip(futures, requests, strict=True))


def test_a_pool_is_its_process_s_own(addresses, monkeypatch):
    with connect(addresses[0], deadlines={"connect": 0.05}) as pool:
        monkeypatch.setattr(pool, "_process", 0)
        with pytest.raises(ServersError, match="made by a different process"):
            pool.submit(REQUESTS[0])


def test_a_future_that_is_cancelled_is_forgotten(addresses, monkeypatch):
    gate = Gate(monkeypatch)
    with running(addresses[0]), connect(addresses[0], home=False) as pool:
        futures = [pool.submit(request) for request in REQUESTS]
        assert all(future.cancel() for future in futures[2:])
        gate.open.set()
        assert all(map(same, [x.result(10) for x in futures[:2]], REQUESTS[:2]))
        wait_until(lambda: not pool.report().waiting)
        assert all_right(pool)


def test_servers_do_not_compute_cancelled_tasks(addresses, monkeypatch):
    gate = Gate(monkeypatch)
    with running(addresses[0]) as server, connect(addresses[0], home=False) as pool:
        futures = [pool.submit(random_request(i, 1024, 1024)) for i in range(4)]
        wait_until(lambda: server.status().waiting == 3)
        assert all(future.cancel() for future in futures)
        wait_until(lambda: not server.status().waiting)
        gate.open.set()
        assert same(pool.submit(REQUESTS[0]).result(10), REQUESTS[0])
        assert len(gate.calls) == 2


def test_closing_ends_what_waits(addresses, monkeypatch):
    gate = Gate(monkeypatch)
    with running(addresses[0]):
        pool = connect(addresses[0], home=False)
        future = pool.submit(REQUESTS[0])
        assert gate.begun.wait(10)
        pool.close()
        pool.close()
        with pytest.raises(ServersError, match="closed"):
            future.result(1)
        with pytest.raises(ServersError, match="closed"):
            pool.submit(REQUESTS[0])
        gate.open.set()
    names = lambda: {x.name for x in threading.enumerate() if x.name.startswith("seqpar-")}  # noqa: E731
    wait_until(lambda: names() <= {"seqpar-grpc"})


def test_hedging_compares_tasks_of_any_size():
    stragglers = StragglerDetector(0.9)
    for i in range(19):
        stragglers.count(100 * (1 + i % 2), 0.1 * (1 + i % 2))
    assert not stragglers.is_late(100, 99.0)  # too few to say
    for i in range(1000):
        stragglers.count(100 * (1 + i % 2), 0.1 * (1 + i % 2))
    assert stragglers.is_late(100, 0.3) and not stragglers.is_late(200, 0.2)
    assert len(stragglers._sorted_pace) == len(stragglers._sorted_work) == 256


def test_requests_that_no_server_takes_are_refused(addresses):
    huge = random_request(0, 1, 1, heads=2000, dim=1)
    nan = REQUESTS[0].options._replace(scale=float("nan"))
    with connect(addresses[0], deadlines={"connect": 0.05}) as pool:
        with pytest.raises(ValueError, match="request must be a Request"):
            pool.submit(5)
        with pytest.raises(ValueError, match="heads must be from 1 to 1024"):
            pool.submit(huge)
        with pytest.raises(ValueError, match="scale must be finite"):
            pool.submit(dataclasses.replace(REQUESTS[0], options=nan))
        assert not pool.report().waiting


@pytest.mark.parametrize("change", [{"slopes": torch.ones(1, 2)}, {"rank_invariant": True}])
def test_requests_refuse_options_that_servers_lack(change):
    options = REQUESTS[0].options._replace(**change)
    with pytest.raises(ValueError, match=f"options.{next(iter(change))} must be"):
        dataclasses.replace(REQUESTS[0], options=options)


def test_callbacks_that_exit_leave_no_waits(addresses, monkeypatch):
    gate = Gate(monkeypatch)
    with running(addresses[0]), connect(addresses[0], home=False) as pool:
        futures = [pool.submit(request) for request in REQUESTS]
        for future in futures[:4]:
            future.add_done_callback(sys.exit)
        gate.open.set()
        for future in futures[4:]:
            with pytest.raises(ServersError, match="the pool has failed: SystemExit"):
                future.result(10)
        with pytest.raises(ServersError, match="the pool has failed: SystemExit"):
            pool.submit(REQUESTS[0])


def test_what_comes_back_is_on_the_requests_device(addresses):
    with running(addresses[0]), connect(addresses[0]) as pool:
        out, lse = pool.submit(REQUESTS[0]).result(10)
        assert out.device == lse.device == torch.device("cpu")
        out += 1  # it is the caller's own
