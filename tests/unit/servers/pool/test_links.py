"""Which server a task goes to."""

from types import SimpleNamespace

import pytest

from seqpar.servers.pool.links import Links

WORK = SimpleNamespace(cost=1.0, avoid=set())


def link(outstanding=0.0, rate=None, last_result=0.0, is_free=True):
    """What `choose` reads of a link; a rate is in tasks a second."""
    return SimpleNamespace(
        outstanding=outstanding,
        rate=rate,
        last_result=last_result,
        free=lambda depth, now: is_free,
        takes=lambda work: True,
    )


@pytest.mark.parametrize(
    ("links", "chosen"),
    [
        ([link(rate=1.0), link(rate=2.0)], 1),
        ([link(rate=1.0), link(rate=2.0, outstanding=2.0)], 0),
        ([link(rate=1.0), link(rate=2.0, is_free=False)], 0),
        ([link(rate=1.0, last_result=5.0), link(rate=2.0, last_result=5.0), link()], 2),  # new
        ([link(), link(outstanding=1.0)], 0),
        ([link(rate=1.0, last_result=2.0), link(rate=1.0, last_result=1.0)], 1),  # it rests
        ([link(is_free=False)], None),
    ],
)
def test_a_task_goes_to_the_soonest_server(links, chosen):
    pool = Links(None, {}, ("", ""), 1.0, depth=2, writes_afar=False)
    for number, made in enumerate(links):
        made.address = str(number)
        pool._links[made.address] = made
    found = pool.choose(WORK, now=0.0)
    pool._links.clear()
    pool.close()
    assert (found and int(found.address)) == chosen
