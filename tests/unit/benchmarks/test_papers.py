"""Papers' figures: each module runs, every published one has its source, and pages hold results."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers import frame, megatron, run
from benchmarks.papers.ring_flash_attention import visits
from benchmarks.papers.training import flops
from seqpar.balance import Cluster, Costs, Model

MODEL = Model.preset("llama-7b")


SLOW = {"lightseq", "ring_flash_attention", "mesh"}  # a second or two each


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ())
        for name in run.MODULES
    ],
)
def test_each_papers_published_figures_are_recomputed(name):
    found, written = run.compute(name, mini=True), frame.read(frame.FOLDER / f"{name}.json")
    assert found.name == written.name == name
    known = {(x.published, x.source) for x in written.points}
    assert {(x.published, x.source) for x in found.points} <= known | {(None, "")}
    assert all(x.predicted > 0 for x in found.points)
    assert any(x.published and not x.fitted for x in found.points)


def test_the_page_holds_what_was_written():
    assert run.PAGE.read_text().endswith(run.generated())
    pictures = {path.stem for path in frame.FOLDER.glob("*.png")}
    assert pictures == {*run.MODULES}


def test_published_figures_have_a_source_and_an_error():
    with pytest.raises(ValueError, match="source: 'speed'"):
        frame.Point("speed", "×", 2.0, published=3.0)
    with pytest.raises(ValueError, match="source"):
        frame.Point("speed", "×", 2.0, source="abstract")
    with pytest.raises(ValueError, match="predicted: 'speed' is inf"):
        frame.Point("speed", "×", float("inf"))
    point = frame.Point("speed", "×", 2.0, published=4.0, source="abstract")
    assert point.error == -0.5
    assert frame.Point("speed", "×", 2.0).error is None


def test_a_paper_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(frame, "FOLDER", tmp_path)
    points = (frame.Point("speed", "×", 2.0, 4.0, "abstract"), frame.Point("time", "ms", 1e-3))
    paper = frame.Paper("one", "One", points)
    frame.write(paper)
    assert frame.read(tmp_path / "one.json") == paper
    assert (tmp_path / "one.png").exists()


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (2.5, "×", "2.50×"),
        (0.411, "ms", "0.411 ms"),
        (442221, "tokens/s", "442,221 tokens/s"),
        (0, "%", "0%"),
    ],
)
def test_values_are_shown_with_three_digits(value, unit, expected):
    assert frame.shown(value, unit) == expected


def test_megatron_on_one_rank_sends_nothing():
    cluster, lengths = Cluster.preset("1x1-a100"), np.array([4096])
    costs = Costs(cluster, MODEL)
    tokens = int(lengths.sum())
    linear = float(costs.tokenwise(tokens) + costs.tokenwise(tokens, True))
    attention = sum(float(costs.span_seconds([0], lengths, backward=x)[0]) for x in (False, True))
    found = megatron.step(lengths, 1, cluster, MODEL, "attention")
    assert found == pytest.approx(linear + attention, rel=1e-3)


def test_megatron_waits_for_four_collectives_per_pass():
    """On so slow a link that nothing else counts: each rank sends its shard to the other one."""
    cluster = Cluster.preset("1x2-a100")
    slow = replace(cluster, inside=replace(cluster.inside, latency=0.0, rate=1e6))
    shard = 1024 * MODEL.hidden * 2 / 2
    expected = len(MODEL.layers) * 3 * 4 * shard / 1e6  # forward, the same again, backward
    found = megatron.step(np.array([1024]), 2, slow, MODEL)
    assert found == pytest.approx(expected, rel=1e-2)


def test_megatron_sends_a_shard_once_per_node():
    """Two nodes of two: a shard to the other node, and two shards to the neighbour."""
    actions = megatron._collective(1, 4, 2, 100, "all-gather", iter(range(2)))
    assert [x.sends for x in actions[:2]] == [((3, 100),), ((0, 200),)]


def test_flops_are_those_of_weights_and_of_pairs():
    lengths = np.array([8, 4])
    pairs = 8 * 9 / 2 + 4 * 5 / 2
    each = 4 * MODEL.heads * MODEL.head_dim * len(MODEL.layers)
    weights = 12 * MODEL.flops_per_token
    assert flops(MODEL, lengths) == pytest.approx(3 * (weights + each * pairs))
    assert flops(MODEL, lengths, forwards=2, causal=False) == pytest.approx(
        4 * (weights + each * 80)
    )


def test_a_zigzag_rank_merges_the_right_rows():
    assert visits("zigzag", 5) == [1.0] * 5 + [0.5] * 2
    assert visits("contiguous", 0) == []
