"""Limits and deadlines."""

import pytest

from seqpar.servers.wire.limits import Deadlines, Limits, ServerDeadlines


@pytest.mark.parametrize(("values", "named"), [
    ({"connect": 0}, "connect"), ({"request": 1.0}, "request"), ({"group": 100.0}, "group"),
    ({"hedge": float("nan")}, "hedge"),
])  # fmt: skip
def test_deadlines_are_ordered(values, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        Deadlines(**values)


def test_limits_and_a_servers_deadlines_are_positive():
    with pytest.raises(ValueError, match=r"^clients"):
        Limits(clients=0)
    with pytest.raises(ValueError, match=r"^idle"):
        ServerDeadlines(idle=0)
