"""Which server gets a task."""

from types import SimpleNamespace

import pytest

from seqpar.servers.pool.connection import PoolEndpoint
from seqpar.servers.pool.known_servers import KnownServers

WORK = SimpleNamespace(cost=1.0, avoid=set())


def server(outstanding=0.0, rate=None, last_result=0.0, is_free=True):
    """The attributes of a connection that `choose` reads; the rate is in tasks per second."""
    return SimpleNamespace(
        outstanding=outstanding,
        rate=rate,
        last_result=last_result,
        is_free=lambda depth, now: is_free,
        accepts=lambda work: True,
    )


@pytest.mark.parametrize(
    ("servers", "chosen"),
    [
        ([server(rate=1.0), server(rate=2.0)], 1),
        ([server(rate=1.0), server(rate=2.0, outstanding=2.0)], 0),
        ([server(rate=1.0), server(rate=2.0, is_free=False)], 0),
        (
            [server(rate=1.0, last_result=5.0), server(rate=2.0, last_result=5.0), server()],
            2,
        ),  # new
        ([server(), server(outstanding=1.0)], 0),
        (
            [server(rate=1.0, last_result=2.0), server(rate=1.0, last_result=1.0)],
            1,
        ),  # longest idle
        ([server(is_free=False)], None),
    ],
)
def test_a_task_goes_to_the_soonest_server(servers, chosen):
    known = KnownServers(PoolEndpoint("", None, 1.0), depth=2)
    for number, made in enumerate(servers):
        made.address = str(number)
        known._connections[made.address] = made
    soonest = known.choose(WORK, now=0.0)
    known._connections.clear()
    assert (soonest and int(soonest.address)) == chosen
