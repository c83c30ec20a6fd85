"""Attention servers on another host, with keys, and a cable between them that is cut for a while.

Each host is a network namespace with one end of the cable. Host 0 trains, host 1 serves.
"""

import ctypes
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from benchmarks.network.emulated import Network, _command, address, lacking
from seqpar.servers.server_check import payload
from seqpar.servers.status_client import ask
from tests.support.requests import random_request
from tests.support.servers import connect, same, wait_until

pytestmark = [
    pytest.mark.alone,
    pytest.mark.exhaustive,
    pytest.mark.skipif(lacking() != "", reason=f"hosts of their own need {lacking()}"),
]
PORTS = (5555, 5556)
SERVERS = [f"tcp://{address(1)}:{port}" for port in PORTS]
REQUESTS = [random_request(i, 16, 32) for i in range(8)]
DEADLINES = {"connect": 1.0, "request": 2.0, "hedge": 30.0, "give_up": 40.0}
CUT = 4.0  # seconds: longer than a pool waits for a sign of life, and than a server for a client
_running = []  # the servers that host 1 has started


def seqpar(*words):
    """Start a command, which ends with the process that starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "seqpar", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
    )  # fmt: skip


def start(keys):
    """Start the servers, on host 1; return what they say."""
    if dist.get_rank() == 0:
        return []
    for port in PORTS:
        _running.append(seqpar("serve", "--bind", f"tcp://0.0.0.0:{port}", "--keys", keys))
    return [server.stdout.readline() for server in _running]


def stop():
    """Tell the servers to end, on host 1; return their exit codes and errors."""
    for server in _running:
        server.send_signal(signal.SIGTERM)
    return [(server.communicate(timeout=30)[1], server.returncode) for server in _running]


def right(pool, home):
    """Have all requests computed right; return how many servers computed, without home."""
    before = [x.tasks for x in pool.report().servers]
    futures = [pool.submit(request) for request in REQUESTS]
    assert all(same(x.result(20), y) for x, y in zip(futures, REQUESTS, strict=True))
    done = [x.tasks - y for x, y in zip(pool.report().servers, before, strict=True)]
    assert sum(done) == len(REQUESTS) and (home or not done[-1]), done
    return sum(done[:-1])


def ready(pool):
    return [x.state for x in pool.report().servers[:-1]] == ["ready"] * len(PORTS)


def train_while_the_cable_is_cut(keys):
    """Host 1 cuts the cable at its end; host 0 trains, and returns what its servers computed."""
    if dist.get_rank() == 1:
        time.sleep(2.0)
        _command("ip", "link", "set", "to0", "down")
        time.sleep(CUT)
        _command("ip", "link", "set", "to0", "up")
        route = f"{address(0)}/32", "dev", "to0", "src", address(1)  # it went with the link
        _command("ip", "route", "add", *route)
        return None
    with connect(*SERVERS, keys=keys, deadlines=DEADLINES) as pool:
        wait_until(lambda: ready(pool))
        assert right(pool, home=False) == len(REQUESTS)
        slowest, end = 0.0, time.monotonic() + 2.0 + CUT
        while time.monotonic() < end:
            begun = time.monotonic()
            right(pool, home=True)
            slowest = max(slowest, time.monotonic() - begun)
            time.sleep(0.02)
        during = pool.report()
        assert all(x.lost for x in during.servers[:-1]) and during.servers[-1].tasks
        assert slowest < DEADLINES["request"] + 1.0, slowest
        wait_until(lambda: ready(pool))
        assert right(pool, home=False) == len(REQUESTS)
        return sum(x.tasks for x in pool.report().servers[:-1])


def tasks_of_servers(keys):
    """What the servers say that they have computed, asked from host 0 until it stands still: what
    was on its way when a client gave it up is still computed."""
    if dist.get_rank():
        return []
    found, before = [ask(server, keys, 5.0).tasks for server in SERVERS], None
    while found != before:
        time.sleep(1.0)
        found, before = [ask(server, keys, 5.0).tasks for server in SERVERS], found
    return found


def train_as_a_stranger(keys):
    """Host 0 with keys that the servers do not list."""
    if dist.get_rank() == 0:
        with connect(*SERVERS, keys=keys, deadlines={"connect": 1.0}) as pool:
            assert right(pool, home=True) == 0
            return [x.state for x in pool.report().servers[:-1]]
    return []


def pass_a_large_task(keys):
    """Host 0 has a task of 92 MiB computed, with the default deadlines."""
    if dist.get_rank():
        return None
    names = "connect", "request", "hedge", "give_up"
    deadlines = dict(zip(names, (5.0, 30.0, 60.0, 120.0), strict=True))
    request = payload(122)
    with connect(*SERVERS, keys=keys, deadlines=deadlines, home=False) as pool:
        wait_until(lambda: ready(pool))
        begun = time.monotonic()
        assert same(pool.submit(request).result(100), request)
        report = pool.report()
        return time.monotonic() - begun, report.retried, sum(x.lost for x in report.servers[:-1])


@pytest.fixture
def keys(tmp_path):
    """The folders of keys of host 0, of host 1, and of a client that is not listed."""
    made = [tmp_path / "made", tmp_path / "others"]
    for folder in made:
        subprocess.run([sys.executable, "-m", "seqpar", "keygen", folder], check=True)
    client, server, stranger = (tmp_path / name for name in ("client", "server", "stranger"))
    others = shutil.ignore_patterns
    shutil.copytree(made[0], client, ignore=others("authority.key", "issued", "server.*"))
    shutil.copytree(made[0], server, ignore=others("authority.key", "issued", "client.*"))
    shutil.copytree(made[1], stranger)
    shutil.rmtree(stranger / "authorities")
    shutil.copytree(made[0] / "authorities", stranger / "authorities")
    return client, server, stranger


def test_servers_on_another_host_survive_a_cut_cable(keys):
    client, server, stranger = keys
    with Network("mesh", ranks=2, timeout=60) as network:
        _, said = network(start, server)
        assert said == [f"serving at tcp://0.0.0.0:{port} on cpu\n" for port in PORTS]
        used, _ = network(train_while_the_cable_is_cut, client)
        computed, _ = network(tasks_of_servers, client)
        assert used <= sum(computed)  # what was on its way when the cable was cut was lost
        states, _ = network(train_as_a_stranger, stranger)
        assert states == ["connecting"] * len(PORTS)
        assert network(tasks_of_servers, client)[0] == computed
        _, ends = network(stop)
        assert ends == [("", 0)] * len(PORTS)


def test_a_large_task_passes_a_slow_cable_once(keys):
    client, server, _ = keys
    with Network("mesh", ranks=2, rate_mbit=64, timeout=150) as network:
        network(start, server)
        (seconds, *faults), _ = network(pass_a_large_task, client)
        assert seconds > 122 / 8 * 0.9 and faults == [0, 0]
        network(stop)
