"""`python -m seqpar bench`: what it refuses, and its status; its rank is in this process."""

import importlib
import importlib.util
import json
import tomllib

import pytest

from seqpar.__main__ import main
from seqpar.bench.workers.ranks import StartError
from seqpar.commands import bench
from tests.support.pages import ROOT
from tests.support.sweeps import Here

TINY = ["bench", "--strategies", "ring", "--peers", "none", "--lengths", "32", "--ranks", "1",
        "--heads", "2:1x8", "--rounds", "2", "--device", "cpu"]  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def here(monkeypatch):
    """The rank that the command has, in the place of processes."""
    rank = Here()

    class Ranks(Here):
        def __init__(self, *_):
            pass

        def __enter__(self):
            return rank

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(bench, "RankProcesses", Ranks)
    return rank


def test_a_sweep_writes_results_and_a_page(here, tmp_path, capsys):
    assert main([*TINY, "--folder", str(tmp_path / "x")]) == 0
    said = capsys.readouterr()
    assert "32 tokens, 2:1x8, causal, fp32" in said.out and "3 of 3: 32 tokens" in said.err
    assert {x.name for x in (tmp_path / "x").iterdir()} == {"bench.json", "bench.md"}
    assert main([*TINY, "--folder", str(tmp_path / "x"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][1]["figures"]["seconds"] > 0 and len(here.requests) == 1 + 2 * 4


def test_a_threshold_is_a_gate(here, tmp_path, capsys):
    rule = {"figure": "error", "contender": "ring", "at_most": 1e-12}
    (tmp_path / "gate.json").write_text(json.dumps({"rules": [rule]}))
    words = [*TINY, "--folder", str(tmp_path), "--threshold", str(tmp_path / "gate.json")]
    assert main(words) == 1
    assert "broken: ring, 32 tokens" in capsys.readouterr().err
    (tmp_path / "gate.json").write_text(json.dumps({"rules": [rule | {"at_most": 1e-3}]}))
    assert main(words) == 0 and len(here.requests) == 1 + 2 * 4  # nothing is measured again


@pytest.mark.parametrize(("words", "wrong"), [
    (["--strategies", "rign"], "strategies must be among"),
    (["--lengths", ","], "lengths must be numbers of tokens such as"),
    (["--preset", "magi"], "heads are those of the preset magi"),
    (["--threshold", "/nonexistent"], "threshold: /nonexistent cannot be read"),
    (["--folder", "/dev/null/x"], "folder: /dev/null/x cannot be used"),
    (["--rounds", "0"], "rounds must be at least 1"),
])  # fmt: skip
def test_mistakes_are_named_before_measuring(here, words, wrong, capsys):
    assert main([*TINY, *words]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("bench: ") and wrong in said.err
    assert said.err.count("\n") == 1 and here.requests == []


def test_too_many_ranks_are_refused_on_all(monkeypatch, capsys):
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main([*TINY, "--ranks", "3"]) == 2
        wrong = "ranks must be at most the 2 processes of the launcher, got 3"
        assert wrong in capsys.readouterr().err


def test_results_of_other_options_are_refused(here, tmp_path, capsys):
    assert main([*TINY, "--folder", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main([*TINY, "--folder", str(tmp_path), "--rounds", "3"]) == 2
    assert "of other options: rounds is 2 there and 3 here" in capsys.readouterr().err


def test_an_interrupt_keeps_measurements_and_its_status(here, tmp_path, capsys):
    ask, asked = here.ask, here.requests

    def interrupted(*arguments):
        if len(asked) == 4:
            raise KeyboardInterrupt
        return ask(*arguments)

    here.ask = interrupted
    assert main([*TINY, "--folder", str(tmp_path)]) == 130
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [row["check"] is not None for row in found["rows"]] == [True, True]
    here.ask = ask
    assert main([*TINY, "--folder", str(tmp_path)]) == 0 and len(here.requests) == 1 + 1 + 2 * 4


def test_without_what_draws_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(TINY) == 2
    assert "it needs rich: pip install 'seqpar[bench]'" in capsys.readouterr().err


def test_the_console_script_is_the_same_program():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["seqpar"].split(":")
    assert getattr(importlib.import_module(module), function) is main


def test_ranks_that_do_not_start_are_an_error(here, tmp_path, capsys):
    here.ask = lambda *_: (_ for _ in ()).throw(StartError("ranks do not begin: no memory"))
    assert main([*TINY, "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == "bench: ranks do not begin: no memory"
