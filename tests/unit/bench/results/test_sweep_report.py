"""What becomes of rows: figures, tables, a page, pictures, and rules that they must keep."""

import copy
import json

import pytest

from seqpar.bench.results import gate, plots, sweep_report
from seqpar.bench.results.results_file import SweepResults
from seqpar.bench.workloads.contenders import ONE
from seqpar.commands import bench
from tests.support.sweeps import options, row


def completed(rows):
    sweep_report.complete(rows)
    return rows


def results(folder, rows, **changes):
    """Results that have these rows, on two hosts."""
    made = SweepResults.open(folder, options(**changes))
    made.content["rows"] = completed(rows)
    made.content["links"] = {
        "places": [{"host": x, "device": "cpu"} for x in "ab"],
        "pairs": [{"ranks": [0, 1], "latency": 1e-4, "rate": 2e9, "between": "hosts"}],
        "slow": ["ranks 0 and 1: 2.00 GB/s each way, the median is 9.00"],
    }
    return made


def test_figures():
    one, ours = row(ONE, [4.0, 2.0, 3.0]), row("ring", [2.5, 2.0, 3.0], exposed=0.25)
    found = completed([one, ours])[1]["figures"]
    # one device has 1 of 2 KV heads: half of the work
    assert found["of_ideal"] == 3.0 / 2.5 and found["ideal_seconds"] == 3.0
    assert found["seconds"] == 2.5 and found["spread"] == [2.25, 2.75]
    assert found["tokens_per_second"] == 64 / 2.5
    area = 64 * 65 // 2
    assert found["tflops_per_device"] == pytest.approx(area * 4 * 8 * 4 / 2.5 / 2 / 1e12)
    assert found["exposed_seconds"] == found["exposed_share"] == 0.25 and found["exposed"] == 0.5
    assert found["bytes"] == 20 and found["memory"] == 2**20
    assert found["error"] == 1e-6 and found["of_one_device"] == 1.1
    assert one["figures"]["tokens_per_second"] is None and one["figures"]["of_ideal"] is None
    assert one["figures"]["tflops_per_device"] == pytest.approx(area * 2 * 8 * 4 / 3 / 1e12)


def test_ranks_beyond_heads_share_one_device():
    ours = row("ring", [1.0], ranks=8)
    found = completed([row(ONE, [4.0], ranks=8), ours])[1]["figures"]
    assert found["ideal_seconds"] == 4.0 * 2 / 8  # one device has 1 of 2 KV heads


def test_what_is_not_known_has_no_figure():
    ours, peer = row("ring", [1.0]), row("all-to-all-by-hand", [1.0])
    peer["costs"] = {"memory": [None], "bytes": [None], "exposure": None}
    completed([row(ONE, [], failed="out of memory"), ours, peer])
    assert ours["figures"]["of_ideal"] is None and ours["figures"]["tokens_per_second"] == 64
    assert peer["figures"]["bytes"] is None and peer["figures"]["memory"] is None
    assert sweep_report.cells(peer)[5:9] == [""] * 4


@pytest.fixture
def rows():
    """Rows of a whole sweep, and one point that failed."""
    found = []
    for ranks in (1, 2, 4):
        for tokens in (64, 128, 256):
            shape = {"ranks": ranks, "tokens": tokens}
            found.append(row(ONE, [1.0 * tokens, 1.5 * tokens], **shape))
            exposed = None if ranks == 1 else 0.1 * ranks
            found.append(row("ring", [2.0 * tokens / ranks], exposed, **shape))
    found[-1]["failed"] = "out of memory: 9 | 9"
    return found


def test_the_page_has_all_points_and_notes(tmp_path, rows):
    text = sweep_report.markdown(results(tmp_path, rows).content, [tmp_path / "strong-x.png"])
    assert "A slow pair of ranks 0 and 1: 2.00 GB/s" in text and "ranks on several hosts" in text
    assert "| 0, 1 | hosts | 100 | 2.00 |" in text and "![strong-x](strong-x.png)" in text
    assert "* ring: out of memory: 9 / 9" in text
    assert "unsteady on 9 of 9 workloads" in text and "at most 20%, at 64 tokens, 4:2x8" in text
    tables = [line for line in text.splitlines() if line.startswith("| ring")]
    assert len(tables) == 8 and {line.count("|") for line in tables} == {
        len(sweep_report.HEADINGS) + 1
    }
    assert text.count("\n## ") == 1 + 9 and "commit" in text and "torch 2" in text


def test_ranks_that_share_cores_are_told(tmp_path, rows):
    found = results(tmp_path, rows).content
    found["environment"]["cores"], found["options"]["ranks"] = 2, [1, 4]
    assert not any("share" in note for note in sweep_report.notes(found))
    found["links"]["places"] = found["links"]["places"][:1]
    assert "4 ranks share 2 cores: these are not times of that many devices." in sweep_report.notes(
        found
    )


def test_a_table_is_printed(tmp_path, rows, capsys):
    sweep_report.show(results(tmp_path, rows).content)
    printed = capsys.readouterr().out
    assert "256 tokens, 4:2x8, causal, fp32, forward, 2 ranks" in printed
    assert "ring: out of memory: 9 | 9" in printed and "% of ideal" in printed
    assert max(map(len, printed.splitlines())) <= 200


@pytest.mark.exhaustive
def test_pictures(tmp_path, rows):
    names = [path.name for path in plots.draw(completed(rows), tmp_path)]
    shape = "4-2x8-causal-fp32-forward.png"
    assert names == [f"{x}-{shape}" for x in ("strong", "weak", "breakdown", "memory")]
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    assert plots.draw(completed([row("ring", [1.0]), row(ONE, [1.0])]), tmp_path) == []


def ruled(tmp_path, rule, **changes):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rules": [rule]}))
    return gate.read(path, options(**changes))


GATED = {"lengths": ["64", "128", "256"], "ranks": ["1", "2", "4"], "heads": ["4:2x8"],
         "passes": ["forward"], "strategies": ["ring", "ulysses"]}  # fmt: skip


@pytest.mark.parametrize(("rule", "broken"), [
    ({"figure": "seconds", "at_most": 1000, "tokens": 64}, []),
    ({"figure": "seconds", "at_most": 100, "tokens": 64},
     ["ring, 64 tokens, 4:2x8, causal, fp32, forward, 1 rank: seconds must be at_most 100, and is "
      "128"]),
    ({"figure": "seconds", "at_least": 100, "tokens": 64, "ranks": 2}, ["and is 64"]),
    ({"figure": "seconds", "at_least": 60, "at_most": 70, "tokens": 64, "ranks": 2}, []),
    ({"figure": "exposed", "at_most": 1, "ranks": 1, "tokens": 64},
     ["not known: it was not measured for this contender"]),
    ({"figure": "seconds", "at_most": 1e9, "ranks": 4, "tokens": 256}, ["not known: out of mem"]),
    ({"figure": "seconds", "relative_to": ONE, "at_most": 1.0, "ranks": 1, "tokens": 64},
     ["seconds over that of one device must be at_most 1, and is 1.6"]),
    ({"figure": "seconds", "relative_to": ONE, "at_most": 1.0, "ranks": 4, "tokens": 64}, []),
    ({"figure": "seconds", "contender": ONE, "at_most": 1, "ranks": 4, "tokens": 64}, ["one dev"]),
    ({"figure": "bytes", "at_most": 1, "ranks": 2}, ["ring, 64", "ring, 128", "ring, 256"]),
])  # fmt: skip
def test_rules(tmp_path, rows, rule, broken):
    found = gate.broken(ruled(tmp_path, rule, **GATED), completed(rows))
    assert len(found) == len(broken)
    assert all(said in text for said, text in zip(broken, found, strict=True)), found


@pytest.mark.parametrize(("text", "wrong"), [
    ("[" * 100_000, "cannot be read"),
    ("{", "cannot be read"), ("[]", 'must have {"rules"'), ('{"rules": []}', "must have"),
    ('{"rules": [3]}', r"rules\[0\] must be an object"),
    ('{"rules": [{"figure": "seconds", "at_most": 1}, {"figure": "speed", "at_most": 1}]}',
     r"rules\[1\] figure must be one of"),
    ('{"rules": [{"figure": ["seconds"], "at_most": 1}]}', "figure must be one of"),
    ('{"rules": [{"figure": "seconds"}]}', "must have at_least or at_most"),
    ('{"rules": [{"figure": "seconds", "at_most": "1"}]}', "numbers, got"),
    ('{"rules": [{"figure": "seconds", "at_most": NaN}]}', "numbers, got"),
    ('{"rules": [{"figure": "seconds", "at_most": true}]}', "numbers, got"),
    ('{"rules": [{"figure": "seconds", "at_most": 1, "at_least": 2}]}', "must not be above"),
    ('{"rules": [{"figure": "seconds", "at_most": 1, "length": 64}]}', r"has \['length'\]"),
    ('{"rules": [{"figure": "seconds", "at_most": 1, "tokens": 63}]}', "selects none"),
    ('{"rules": [{"figure": "seconds", "at_most": 1, "contender": "usp"}]}', "must be measured"),
    ('{"rules": [{"figure": "seconds", "at_most": 1, "relative_to": "usp"}]}', "must be measured"),
])  # fmt: skip
def test_rule_files_that_do_not_fit_are_named(tmp_path, text, wrong):
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=wrong) as error:
        gate.read(path, options(**GATED))
    assert str(error.value).startswith(f"threshold: {path}")


def test_the_status_says_whether_all_is_well(tmp_path, rows, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw", lambda rows, folder: [folder / "strong.png"])
    made, rule = results(tmp_path, rows), {"figure": "bytes", "at_most": 10, "ranks": 1}
    assert bench.conclude(made, [], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["broken"] == []
    assert "![strong](strong.png)" in (tmp_path / "bench.md").read_text()
    assert bench.conclude(made, [rule], as_json=False) == 1
    said = capsys.readouterr()
    assert said.err.count("broken: ring") == 3 and "bench.md" in said.out
    wrong = copy.deepcopy(made)
    wrong.rows[1]["failed"] = "wrong, so it was not timed"
    assert bench.conclude(wrong, [], as_json=True) == 1


def test_what_failed_is_not_counted():
    rows = [row(name, [], failed="out of memory", tokens=2**31 - 1) for name in (ONE, "ring")]
    completed(rows)  # the area of so long a batch would take all memory
    assert [x["figures"] for x in rows] == [None, None]
