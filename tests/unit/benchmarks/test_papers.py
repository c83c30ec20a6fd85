"""Papers: figures are predicted, published ones have a source, and the page holds the results."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers import megatron, run
from benchmarks.papers.ring_flash_attention import visits
from benchmarks.papers.virtual_time import flops
from seqpar.balance import Cluster, Costs, Model

MODEL = Model.preset("llama-7b")


SLOW = {"lightseq", "ring_flash_attention", "mesh"}  # a second or two each


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ())
        for name in run.PAPERS
    ],
)
def test_each_papers_published_figures_are_predicted(name):
    found = run.PAPERS[name](True)
    assert all(x > 0 for x in found.values())
    published = [what for what, _, *known in run.data_of(name)["figures"] if len(known) == 2]
    assert set(published) & set(found)


@pytest.mark.parametrize("name", run.PAPERS)
def test_results_have_the_figures_of_the_data(name):
    written, data = json.loads((run.FOLDER / f"{name}.json").read_text()), run.data_of(name)
    assert (written["name"], written["title"]) == (name, data["title"])
    names = [what for what, *_ in data["figures"]]
    assert names == [x["what"] for x in written["points"]] and len({*names}) == len(names)
    assert run.compared(name, {x["what"]: x["predicted"] for x in written["points"]}) == written
    for _, _, *known in data["figures"]:  # a value has a source
        assert not known or (known[0] > 0 and known[1] and known[2:] in ([], [True]))


def test_the_page_holds_what_was_written():
    assert run.PAGE.read_text().endswith(run.generated())
    pictures = {path.stem for path in run.FOLDER.glob("*.png")}
    assert pictures == {*run.PAPERS}


def test_predictions_are_those_of_the_data():
    with pytest.raises(ValueError, match=r"data/usp.toml has no figures \['speed'\]"):
        run.compared("usp", {"speed": 2.0})
    with pytest.raises(ValueError, match="usp: 'MFU, of all pairs' is inf"):
        run.compared("usp", {"MFU, of all pairs": float("inf")})
    (point,) = run.compared("usp", {"MFU, of all pairs": 43.0})["points"]
    assert point["published"] == 86 and point["error"] == -0.5 and not point["fitted"]
    (point,) = run.compared("usp", {"MFU, of the pairs that attend: Ring": 43.0})["points"]
    assert point["published"] is None and point["error"] is None


def test_a_paper_is_written_with_its_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    paper = run.compared(
        "usp", {"MFU, of all pairs": 80.0, "MFU, of the pairs that attend: Ring": 30.0}
    )
    run.write(paper)
    assert json.loads((tmp_path / "usp.json").read_text()) == paper
    assert (tmp_path / "usp.png").exists()


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
    assert run.shown(value, unit) == expected


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
