"""The benchmark of choices by simulation: its settings, its figures, and all of it in miniature."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.network import emulated
from benchmarks.simulate import choices
from benchmarks.simulate.settings import PAIRS, RATES, ROW_BYTES, drawn
from seqpar.costs.fit import describe
from tests.support.commands import fork_spawned
from tests.support.synthetic_device import made_profile

ROOT = Path(__file__).parents[3]


def test_settings_depend_only_on_the_seed():
    found = [drawn(seed) for seed in range(40)]
    assert found == [drawn(seed) for seed in range(40)] and len({*found}) == 40
    assert {x.ranks for x in found} == {2, 4} and {x.rate_mbit for x in found} == {0, *RATES}
    assert {bool(x.window) for x in found} == {len(x.lengths) > 1 for x in found} == {True, False}
    for x in found:
        assert (x.pair_seconds > 0) == (x.rate_mbit > 0)
        assert 2048 <= sum(x.lengths) <= 16384 and x.made().tokens == sum(x.lengths)
        assert sum(x.lengths) / x.ranks * x.heads * x.dim * 4 <= ROW_BYTES
        assert 0 < x.pairs * x.heads * x.dim / 64 <= PAIRS
    assert {drawn(seed, links=False).rate_mbit for seed in range(20)} == {0}


def row(loss, seconds, ranks=4):
    figures = {
        "ranks": ranks,
        "chosen": "a",
        "auto": "b",
        "best": "b",
        "loss": loss,
        "auto_loss": 0.0,
    }
    simulated = {name: 1.1 * x for name, x in seconds.items()}
    return figures | {"measured": seconds, "spread": 0.01, "simulated": simulated}


def test_a_choice_near_the_fastest_is_good():
    rows = [row(0.04, {"a": 1.04, "b": 1.0}), row(0.5, {"a": 1.5, "b": 1.0, "c": 1.05})]
    found = choices.summary(rows)
    assert found["predicted"] == {"near": 0.5, "fastest": 0.0, "mean": 0.27, "worst": 0.5}
    assert found["auto"] == {"near": 1.0, "fastest": 1.0, "mean": 0.0, "worst": 0.0}
    assert found["always"] == {"a": (0.5, 2), "b": (1.0, 2), "c": (1.0, 1)}
    assert found["error"] == pytest.approx(0.1)
    assert "| always c: within 5% | 100% of 1 |" in choices.table(found)
    assert "| auto: within 5% of the fastest | 100% |" in choices.table(found)
    assert "| prediction alone: within 5% of the fastest | 50% |" in choices.table(found)


def test_candidates_with_the_same_code_are_compared():
    rows = [row(0, {"ring": 1.0, "all_gather": x, "a": 1, "b": 1}, 2) for x in (1.04, 1.06, 0.9)]
    found = choices.summary([*rows, row(0, {"a": 1.0, "b": 1.0})])
    assert found["same_code"] == (1 / 3, 3)
    assert "the same code: within 5% of each other | 33% of 3 |" in choices.table(found)


def test_the_page_shows_the_committed_run():
    (file,) = (ROOT / "benchmarks" / "results").glob("*/choices.json")
    found = json.loads(file.read_text())
    page = (ROOT / "docs" / "benchmarks" / "simulate.md").read_text()
    summary = choices.summary(found["results"])
    assert summary["settings"] == 100
    for name, key in (("auto", "auto"), ("prediction alone", "predicted")):
        x = summary[key]
        figures = f"{x['near']:.0%} | {x['fastest']:.0%} | {x['mean']:.1%} | {x['worst']:.1%}"
        assert f"| {name} | {figures} |" in page
    for name, (share, settings) in summary["always"].items():
        assert settings < 100 or f"| always {name} | {share:.0%} | | | |" in page
    share, settings = summary["same_code"]
    words = " ".join(page.split())
    assert f"within 5% of each other in {share:.0%} of the {settings} settings" in words
    error = f"{summary['error']:.1%}"
    assert f"The median error of the simulated times is {error}" in words


@pytest.mark.exhaustive
def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    """On real ranks, with the synthetic device's profile; nothing is asked of the clock."""
    profiled = choices.Cluster(**describe(made_profile()))
    monkeypatch.setattr(choices, "profiled", lambda *_: profiled)
    monkeypatch.setattr(choices.harness, "canary", lambda: 1.0)
    module = "benchmarks.simulate"  # less time to measure candidates, and less beside a message
    changes = {f"{module}.settings.SECONDS": 0.2, f"{module}.ranks._BESIDE": 2**18}
    fork_spawned(monkeypatch, emulated, changes)
    words = ["choices", "--no-links", "--rounds", "2", "--tokens", "64", "256"]
    words += ["--folder", str(tmp_path)]

    def run(*more):
        monkeypatch.setattr("sys.argv", [*words, *more])
        code = choices.main()
        path = harness.results_file(tmp_path, "choices")
        return code, json.loads(path.read_text())

    code, found = run("--settings", "1", "--seconds", "0")
    assert code == choices.START_AGAIN and found["rows"] == []
    with pytest.raises(ValueError, match="of other options: asked"):
        run("--rounds", "3")
    code, found = run("--settings", "1")
    assert code == 0 and len(found["rows"]) == len(found["results"]) == 1
    before = found["rows"]
    code, found = run("--settings", "2")
    assert code == 0 and found["rows"][:1] == before and len(found["rows"]) == 2
    for each in found["results"]:
        assert set(each["measured"]) == set(each["simulated"])
        assert np.isfinite(list(each["simulated"].values())).all() and each["loss"] >= 0
        assert each["auto_loss"] >= 0 and each["auto"] in each["measured"]
    assert "auto: within" in capsys.readouterr().out
