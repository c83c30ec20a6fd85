"""What operators take the host in a call, of which a clock of our own is asked."""

from dataclasses import replace

import pytest

from seqpar.balance import Cluster
from seqpar.simulate import host

CORES = replace(Cluster.preset("1x2-h100"), overlaps=False)


def test_it_is_what_each_operator_adds_to_a_call(monkeypatch):
    """Calls whose clock goes on by 3 for each operator, and by 100 for each call."""
    counted = {}
    real, now = host._call, iter(range(10**9))
    monkeypatch.setattr(host.time, "thread_time", lambda: float(next(now)))

    def call(strategy, ranks):
        operators, seconds = real(strategy, ranks)
        counted[strategy, ranks] = operators
        assert seconds == 1.0  # the clock goes on by 1 when it is asked
        return operators, 100.0 + 3.0 * operators

    monkeypatch.setattr(host, "_call", call)
    assert host.operator_seconds() == pytest.approx(3.0)
    assert len(set(counted.values())) > 4 and min(counted.values()) > 5
    assert counted["token_ring", 8] > counted["token_ring", 2]


def test_it_is_never_nothing(monkeypatch):
    monkeypatch.setattr(host, "_call", lambda strategy, ranks: (ranks, 10.0 - ranks))
    assert 0 < host.operator_seconds() < 1e-8


def test_clusters_of_cores_have_it_and_others_do_not(monkeypatch):
    monkeypatch.setattr(host, "operator_seconds", lambda: 5e-6)
    assert host.with_host(CORES).device.operator == 5e-6
    assert host.with_host(CORES).inside == CORES.inside
    assert host.with_host(Cluster.preset("1x2-h100")) == Cluster.preset("1x2-h100")
