"""Caches on attention servers as processes, which are killed, stopped and started again."""

import threading

import pytest

from seqpar.servers.status_client import ask
from seqpar.servers.transport.one_sided import available
from tests.support.processes import PROCESSES
from tests.support.server_caches import decode, drawn, prefilled, same_bits, undisturbed
from tests.support.servers import QUICK, ServerProcess, connect, processes, wait_until
from tests.support.tiers import few_rows

pytestmark = pytest.mark.alone
EXHAUSTIVE = pytest.mark.exhaustive
NIXL = pytest.mark.skipif(not available(), reason="needs nixl")
TENSORS = drawn()


def caches(server):
    return ask(server.address, None, 10.0).caches


@few_rows(pairs=False)
@pytest.mark.parametrize(("how", "transport"), [
    ("SIGKILL", "grpc"),
    pytest.param("SIGSTOP", "grpc", marks=EXHAUSTIVE),
    pytest.param("SIGTERM", "grpc", marks=EXHAUSTIVE),
    pytest.param("SIGKILL", "nixl", marks=[EXHAUSTIVE, NIXL]),
    pytest.param("SIGSTOP", "nixl", marks=[EXHAUSTIVE, NIXL]),
])  # fmt: skip
@pytest.mark.parametrize("moment", ["between steps", pytest.param("in a step", marks=EXHAUSTIVE)])
def test_a_cache_outlives_its_server(tmp_path, how, transport, moment):
    wanted, transports = undisturbed(tmp_path, TENSORS), [transport, "grpc"]
    options = {"transports": transports, "deadlines": QUICK}
    if moment == "in a step":
        options["slow"] = 0.1
    with (
        processes(tmp_path, 2, **options) as servers,
        connect(*[x.address for x in servers], transports=transports, home=False) as pool,
    ):
        wait_until(lambda: [x.state for x in pool.report().servers[:2]] == ["ready"] * 2)
        with prefilled(pool, TENSORS) as cache:
            assert sum(map(caches, servers)) == 2

            def between(i):
                if i == 2:
                    soon = threading.Timer(
                        0.05 if options.get("slow") else 0.0, servers[0].signal, [how]
                    )
                    soon.start()
                    if moment == "between steps":
                        soon.join()
                if i == 5:
                    come_back()

            def come_back():
                if how == "SIGSTOP":
                    servers[0].signal("SIGCONT")
                else:
                    servers[0].end()
                    wait_until(lambda: pool.report().servers[0].lost)
                    servers[0] = ServerProcess(servers[0].address, **options)
                    assert servers[0].address
                wait_until(lambda: pool.report().servers[0].state == "ready")

            assert same_bits(decode(cache, TENSORS, between), wanted)
            assert pool.report().servers[0].lost and not pool.report().servers[-1].tasks
        wait_until(
            lambda: [caches(x) for x in servers] == [0, 0]
        )  # a stopped one's end with a lease


@EXHAUSTIVE
def test_a_client_that_is_killed_leaves_no_cache(tmp_path):
    with processes(tmp_path, 1, deadlines=QUICK) as servers:
        client = PROCESSES.Process(target=_fill, args=(servers[0].address,), daemon=True)
        client.start()
        wait_until(lambda: caches(servers[0]) == 2, 60)
        client.kill()
        wait_until(lambda: caches(servers[0]) == 0)


def _fill(address):
    """Hold a cache for ever."""
    with connect(address) as pool:
        cache = prefilled(pool, TENSORS)
        threading.Event().wait()
        cache.close()
