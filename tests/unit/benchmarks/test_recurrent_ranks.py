"""The benchmark of recurrent attention on ranks, in miniature."""

import pytest

from benchmarks.network import emulated
from benchmarks.recurrent import ranks
from tests.support.commands import fork_spawned


@pytest.mark.exhaustive  # three processes start
def test_it_checks_and_times_both(monkeypatch):
    fork_spawned(monkeypatch, emulated)
    networks = emulated.Network("loopback", 1), emulated.Network("loopback", ranks.RANKS)
    with networks[0] as one, networks[1] as both:
        rows = ranks.compared(one, both, "gated_delta", "tree", (96, 2, 8), rounds=1)
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    assert all(max(row["errors"].values()) <= ranks.LIMIT for row in rows)
    assert all(len(row["seconds"]["ranks"]) == 1 for row in rows)
