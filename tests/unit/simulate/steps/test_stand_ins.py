"""Large groups of ranks with even work: some nodes are played in place of all."""

import dataclasses

import numpy as np
import pytest

from seqpar import Layout, simulate
from seqpar.balance import Cluster, FatTree, Torus
from seqpar.simulate.playback import stand_ins
from seqpar.simulate.playback.stand_ins import choose_stand_ins, has_even_work
from seqpar.simulate.steps.recorded_layers import record_attention_once
from tests.support.tiers import few_rows
from tests.unit.simulate.recommendations.test_divisions import HYBRID
from tests.unit.simulate.steps.test_training_step import MODEL

CLUSTER = Cluster.preset("8x4-h100")  # nodes 0, 2, 5 and 7 are played
SLOW = dataclasses.replace(
    CLUSTER, between=dataclasses.replace(CLUSTER.between, rate=CLUSTER.between.rate / 8)
)
FULL_TREE = dataclasses.replace(CLUSTER, fabric=FatTree(2))
LAYOUT = Layout.zigzag([0, 9_000, 32_768], 32)
WINDOWED = dataclasses.replace(
    MODEL, layers=tuple(dataclasses.replace(x, kind="window", window=700) for x in MODEL.layers)
)


def step_twice(monkeypatch, *arguments, **options):
    """Return a step with all ranks played, then one with stand-ins."""
    simulated = []
    for most in (32, 31):
        monkeypatch.setattr(stand_ins, "MAX_RANKS_PLAYED_WHOLE", most)
        record_attention_once.cache_clear()
        simulated.append(simulate.step(*arguments, **options))
    return simulated


def played(step):
    return {event.rank for outcome, _ in step.layers.values() for event in outcome.trace.events}


@few_rows(pairs=False)
@pytest.mark.parametrize("cluster", [CLUSTER, SLOW, FULL_TREE], ids=["fast", "slow", "tree"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ring", {}),
        ("ring", {"sharding": "full", "checkpointing": "full", "offload": 0.5}),
        ("all_gather", {"sharding": "gradients"}),
        ("ulysses", {}),
        ("usp", {"mesh": (8, 4)}),
        ("mesh", {"mesh": (8, 4)}),
    ],
)
def test_stand_ins_predict_what_all_ranks_do(monkeypatch, strategy, options, cluster):
    whole, sampled = step_twice(monkeypatch, strategy, LAYOUT, cluster, MODEL, **options)
    assert played(whole) == {*range(32)}
    assert played(sampled) == {*range(4), *range(8, 12), *range(20, 24), *range(28, 32)}
    assert sampled.seconds == pytest.approx(whole.seconds, rel=0.01)
    for activity in ("busy", "waiting"):
        predicted, exact = (x.spent(activity).mean() for x in (sampled, whole))
        assert predicted == pytest.approx(exact, abs=0.01 * whole.seconds)
    assert sampled.memory.shape == sampled.bytes.shape == (32,)
    assert sampled.memory.max() == pytest.approx(whole.memory.max(), rel=0.02)
    assert sampled.bytes.max() == pytest.approx(whole.bytes.max(), rel=1e-3)


@pytest.mark.exhaustive
def test_states_that_are_gathered_have_stand_ins(monkeypatch):
    whole, sampled = step_twice(
        monkeypatch, "ring", LAYOUT, CLUSTER, HYBRID, transport="all_gather"
    )
    assert len(played(sampled)) == 16
    assert sampled.seconds == pytest.approx(whole.seconds, rel=2e-3)
    whole, sampled = step_twice(monkeypatch, "ring", LAYOUT, CLUSTER, HYBRID, transport="scan")
    assert sampled.seconds == pytest.approx(whole.seconds, rel=2e-3)
    assert len(played(sampled)) == 32  # each rank waits for the one before


def test_windows_have_stand_ins(monkeypatch):
    whole, sampled = step_twice(monkeypatch, "ring", LAYOUT, CLUSTER, WINDOWED)
    assert len(played(sampled)) == 16
    assert sampled.seconds == pytest.approx(whole.seconds, rel=2e-3)


@pytest.mark.exhaustive
def test_ranks_that_exchange_differently_are_all_played(monkeypatch):
    monkeypatch.setattr(stand_ins, "has_even_work", lambda geometry: True)
    layout = Layout.contiguous([0, 32_768], 32)  # causal: the first rank receives nothing
    whole, sampled = step_twice(monkeypatch, "ring", layout, CLUSTER, MODEL)
    assert played(sampled) == {*range(32)} and sampled.seconds == whole.seconds


@pytest.mark.parametrize(
    ("strategy", "layout", "cluster"),
    [
        ("token_ring", LAYOUT, CLUSTER),
        ("disaggregated", LAYOUT, CLUSTER),
        ("ring", Layout.contiguous([0, 32_768], 32), CLUSTER),  # causal: the last rank has most
        ("ring", Layout.contiguous(np.arange(33) * 1000, 32), CLUSTER),  # no rank exchanges
        ("ring", Layout.zigzag([0, 30_000], 30), CLUSTER),  # half a node
        ("ring", LAYOUT, dataclasses.replace(CLUSTER, fabric=FatTree(2, 2.0))),
        ("ring", LAYOUT, dataclasses.replace(CLUSTER, fabric=FatTree(2, rails=True))),
        ("ring", LAYOUT, dataclasses.replace(CLUSTER, fabric=Torus((8,)))),
        ("ring", LAYOUT, dataclasses.replace(CLUSTER, overlaps=False)),
    ],
)
def test_unsuitable_groups_play_all_ranks(monkeypatch, strategy, layout, cluster):
    monkeypatch.setattr(stand_ins, "MAX_RANKS_PLAYED_WHOLE", 8)
    chosen = choose_stand_ins(strategy, layout.geometry, cluster)
    assert chosen.tolist() == [*range(layout.ranks)]
    assert choose_stand_ins("ring", LAYOUT.geometry, CLUSTER).tolist() != [*range(32)]


def test_even_work_allows_few_short_documents():
    edges = np.cumsum([0, 100_000, 40, 50, 60_000])
    assert has_even_work(Layout.zigzag(edges, 32).geometry)
    assert not has_even_work(Layout.zigzag([*edges, 170_000], 32, min_chunk=1000).geometry)
    short = np.r_[0, np.cumsum([100_000] + [31] * 200)]  # 6% of the tokens are on half of the ranks
    assert not has_even_work(Layout.zigzag(short, 32).geometry)


def test_the_nearest_node_stands_in(monkeypatch):
    monkeypatch.setattr(stand_ins, "MAX_RANKS_PLAYED_WHOLE", 32)
    cluster = Cluster.preset("16x4-h100")  # nodes 0, 5, 10 and 15 are played
    chosen = choose_stand_ins("ring", Layout.zigzag(64_000, 64).geometry, cluster)
    nodes, places = np.divmod(chosen, 4)
    assert nodes[::4].tolist() == [0, 0, 0, 5, 5, 5, 5, 5, 10, 10, 10, 10, 10, 15, 15, 15]
    assert places.tolist() == [*range(4)] * 16


def test_a_thousand_ranks_are_simulated_by_32():
    layout, cluster = Layout.zigzag([0, 2**20], 1024), Cluster.preset("128x8-h100")
    chosen = choose_stand_ins("usp", layout.geometry, cluster)
    assert chosen.shape == (1024,) and len({*chosen.tolist()}) == 32
