"""`python -m seqpar plan`."""

import itertools
import json
import re

import pytest

from seqpar import simulate
from seqpar.__main__ import main
from seqpar.balance import Cluster
from seqpar.simulate.recommendations import predicting
from tests.unit.simulate.steps.test_training_step import SMALL


@pytest.fixture
def files(tmp_path):
    """Files of a model, a cluster and lengths, and one that is not there."""
    names = "model", "cluster", "lengths", "none", "binary", "deep"
    paths = {x: tmp_path / f"{x}.json" for x in names}
    paths["model"].write_text(json.dumps(SMALL))
    Cluster.preset("1x2-h100").to_json(paths["cluster"])
    paths["lengths"].write_text("300\n512x2, 5\n")
    paths["binary"].write_bytes(b"\xff\xff")
    paths["deep"].write_text("[" * 100_000)
    return {name: str(path) for name, path in paths.items()}


def plan(capsys, *words):
    code = main(["plan", *words])
    return code, *capsys.readouterr()


def test_it_prints_the_table_and_the_code(files, capsys):
    words = [x for name in ("model", "cluster", "lengths") for x in (f"--{name}", files[name])]
    code, out, err = plan(capsys, *words)
    assert code == 0 and not err
    assert out.startswith("strategy, layout") and "seqpar.make_attention(" in out
    table, code_lines = out.split("\n\nimport torch", 1)
    assert len(table.splitlines()) == 1 + 10 + 1 and table.endswith("--rows 0 shows all.")
    code, out, _ = plan(capsys, *words, "--json")
    rows = json.loads(out)
    assert rows[0]["why_not"] is None and rows[0]["seconds"] <= rows[-1]["seconds"]
    speed, tokens = rows[0]["tokens_per_second"], 300 + 2 * 512 + 5
    assert speed == pytest.approx(tokens / rows[0]["seconds"] / 2) and 0 < rows[0]["mfu"] < 1
    *_, choice, how_fast, memory = code_lines.splitlines()
    assert choice == f"choice: {table.splitlines()[1].split('  ')[0]}"
    assert f"a step of {tokens:,} tokens, {speed:,.0f} tokens/s per GPU, MFU " in how_fast
    assert "of 80.0 GB on the fullest GPU" in memory
    code, out, _ = plan(capsys, *words, "--rows", "0")
    table, _ = out.split("\n\nimport torch", 1)
    assert len(table.splitlines()) == 1 + len(rows) and "--rows" not in table


def test_a_cluster_is_saved_and_contradictions_are_named(files, capsys, tmp_path):
    saved = tmp_path / "what_if.json"
    words = "--model", files["model"], "--lengths", "64", "--save-cluster", str(saved)
    assert plan(capsys, *words, "--cluster", "1x2-h100")[0] == 0
    described = json.loads(saved.read_text())
    code, _, err = plan(capsys, *words[:4], "--cluster", "1x2-h100", words[4], str(tmp_path))
    assert code == 2 and "save-cluster: /" in err and "cannot be written" in err
    assert {x.name for x in tmp_path.parent.glob(f"{tmp_path.name}.*")} == set()
    for change, message in (
        ({"ranks": 5}, "ranks must be nodes · devices_per_node = 2"),
        ({"nodes": 2, "ranks": 4, "nics": 0}, "nics must be at least 1"),
        ({"speed": 1}, "only, got 'speed'"),
    ):
        saved.write_text(json.dumps(described | change))
        code, _, err = plan(capsys, *words[:4], "--cluster", str(saved))
        assert code == 2 and message in err
    slow = described | {"inside": {"latency": 1e-3, "rate": 1e6}}
    saved.write_text(json.dumps(slow))
    in_one_group = "--parallelism", "context", "--json"
    code, out, _ = plan(capsys, *words[:4], "--cluster", str(saved), *in_one_group)
    assert code == 0 and json.loads(out)[-1]["limit"] == "communication"


def test_presets_work_and_misfits_set_the_status(capsys):
    words = "--model", "llama-70b", "--cluster", "1x1-h100", "--lengths", "100, 20", "--json"
    code, out, _ = plan(capsys, *words)
    rows = json.loads(out)
    assert code == 1 and {x["seconds"] for x in rows} == {None} and rows[0]["memory"] > 80e9
    assert {x["mfu"] for x in rows} == {x["tokens_per_second"] for x in rows} == {None}
    _, out, _ = plan(capsys, *words[:-1])
    assert "choice: none. The closest is " in out.splitlines()[-1] and " too much" in out


def test_an_interrupted_plan_is_printed_as_partial(files, capsys, monkeypatch):
    steps = itertools.count()

    def interrupted(*arguments, **options):
        if next(steps) == 2:
            raise KeyboardInterrupt
        return simulate.step(*arguments, **options)

    monkeypatch.setattr(predicting, "step", interrupted)
    words = [x for name in ("model", "cluster", "lengths") for x in (f"--{name}", files[name])]
    code, out, _ = plan(capsys, *words)
    assert code == 130 and "seqpar.make_attention(" in out
    assert re.search(r"^partial, because it was interrupted: 2 of \d+ ways", out, re.M)


WRONG = [
    ({"model": "llama"}, "plan: preset must be one of"),
    ({"cluster": "4x9-h100"}, "a node has 1 to 8 devices"),
    ({"cluster": "none"}, "plan: cluster: .*none.json cannot be read: No such file"),
    ({"model": "none"}, "plan: model: .*none.json cannot be read: No such file"),
    ({"model": "lengths"}, "plan: model: .*lengths.json is not JSON"),
    ({"lengths": "none"}, "plan: lengths: .*none.json cannot be read: No such file"),
    ({"lengths": "model"}, "plan: lengths: .*model.json must be numbers of tokens such as 4096"),
    ({"lengths": "0"}, "plan: lengths must have at least one token"),
    *(
        ({name: "binary"}, f"plan: {name}: .*is not text")
        for name in ("model", "cluster", "lengths")
    ),
    ({"model": "deep"}, "plan: model: .*deep.json is not JSON"),
    ({"cluster": "deep"}, "plan: .*deep.json: text must be JSON"),
    *(
        (
            {"lengths": text},
            f"plan: lengths must be numbers of tokens such as .*, got '{word}'; there",
        )
        for text, word in {"5,-3": "-3", "a": "a", "16384x": "16384x", "1.5K": "1.5K"}.items()
    ),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_what_is_wrong_is_named(files, capsys, changed, message):
    given = {"model": "model", "cluster": "cluster", "lengths": "7"} | changed
    words = [x for name, y in given.items() for x in (f"--{name}", files.get(y, y))]
    code, out, err = plan(capsys, *words)
    assert code == 2 and not out
    assert re.search(message, err)
