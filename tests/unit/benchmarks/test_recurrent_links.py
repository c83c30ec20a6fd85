"""The benchmark of recurrent attention on links, in miniature and without limits."""

import pytest

from benchmarks.network import emulated
from benchmarks.recurrent import links
from tests.support.commands import fork_spawned


@pytest.mark.exhaustive  # two processes start
def test_it_checks_and_times_all_transports(monkeypatch):
    fork_spawned(monkeypatch, emulated)
    loopback = emulated.Network("loopback", 1), emulated.Network("loopback", links.RANKS)
    with loopback[0] as one, loopback[1] as ranks:
        rows = links.measured(one, ranks, [(128, 2, 8)], rounds=1)
    assert [row["transport"] for row in rows] == [*links.LAYOUTS] * 2
    state = 2 * 8 * 8 * 4  # bytes
    sent = {(row["transport"], row["pass"]): row["bytes"] for row in rows}
    for transport in ("scan", "tree"):  # rank 0's states go forward, and gradients come back
        assert {sent[transport, passes] for passes in links.PASSES.values()} == {state}
    assert all(row["ratio"] > 0 and row["fraction"] is not None for row in rows)
