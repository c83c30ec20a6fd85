"""What operators take the host in a call, of which a clock of our own is asked."""

from dataclasses import replace

import pytest

from seqpar.auto import described_cluster
from seqpar.balance import Cluster

CORES = replace(Cluster.preset("1x2-h100"), overlaps=False)


def test_overhead_is_what_each_operator_adds(monkeypatch):
    """Calls whose clock goes on by 3 for each operator, and by 100 for each call."""
    counted = {}
    real, now = described_cluster._call, iter(range(10**9))
    monkeypatch.setattr(described_cluster.time, "thread_time", lambda: float(next(now)))

    def call(strategy, ranks, end):
        operators, seconds = real(strategy, ranks, end)
        counted[strategy, ranks] = operators
        assert seconds == 1.0  # the clock goes on by 1 when it is asked
        return operators, 100.0 + 3.0 * operators

    monkeypatch.setattr(described_cluster, "_call", call)
    assert described_cluster.operator_seconds() == pytest.approx(3.0)
    assert len(set(counted.values())) > 4 and min(counted.values()) > 5
    assert counted["token_ring", 8] > counted["token_ring", 2]


def test_a_busy_machine_measures_few_rounds(monkeypatch):
    """The time is over before the first call, as if each one took very long."""
    rounds, real = [], described_cluster.time.thread_time
    monkeypatch.setattr(described_cluster, "_MAX_SECONDS", -1.0)
    monkeypatch.setattr(described_cluster.time, "thread_time", lambda: rounds.append(1) or real())
    assert described_cluster.operator_seconds() > 0
    calls = len(described_cluster._STRATEGIES) * len(described_cluster._RANKS)
    assert len(rounds) == 2 * calls * described_cluster._MIN_ROUNDS


def test_it_is_never_nothing(monkeypatch):
    monkeypatch.setattr(
        described_cluster, "_call", lambda strategy, ranks, end: (ranks, 10.0 - ranks)
    )
    assert 0 < described_cluster.operator_seconds() < 1e-8


def test_only_clusters_of_cores_have_launch_overhead(monkeypatch):
    monkeypatch.setattr(described_cluster, "operator_seconds", lambda: 5e-6)
    assert described_cluster.with_host(CORES).device.operator == 5e-6
    assert described_cluster.with_host(CORES).inside == CORES.inside
    assert described_cluster.with_host(Cluster.preset("1x2-h100")) == Cluster.preset("1x2-h100")
