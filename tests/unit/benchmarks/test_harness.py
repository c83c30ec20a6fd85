"""What all benchmarks share: the canary, errors, and where results go."""

import json

import pytest
import torch

import seqpar
from benchmarks import harness, steps
from seqpar.comm.messages.comm import Comm


def test_a_canary_that_drifts_refuses_the_run():
    assert harness.check_canary(1.0, 1.04) == pytest.approx(0.04)
    with pytest.raises(harness.UnsteadyError, match="apart"):
        harness.check_canary(1.0, 0.9)


def test_the_worst_tensor_gives_the_error():
    expected = [torch.full((8,), 2.0), torch.full((8,), 4.0)]
    found = [torch.full((8,), 2.0), torch.full((8,), 3.0)]
    assert harness.worst_error(found, expected) == pytest.approx(0.25)


def test_results_lie_in_their_devices_folder(tmp_path):
    path = harness.write(tmp_path, "found", {"rows": [1]})
    assert (
        path
        == harness.results_file(tmp_path, "found")
        == tmp_path / harness.device_slug() / "found.json"
    )
    written = json.loads(path.read_text())
    assert written["rows"] == [1]
    assert written["environment"]["versions"]["torch"] == torch.__version__


def test_exposed_sleeps_for_computes_and_counts_bytes(monkeypatch):
    slept, sent = [], iter([100, 130])
    monkeypatch.setattr(harness.time, "sleep", slept.append)
    alone = Comm("alone", 0, 1)
    attn, layout = seqpar.RingAttention(alone), seqpar.Layout.contiguous(4, 1)
    q = torch.zeros(4, 2, 8)

    def step():
        attn(q, q, q, layout, causal=False)

    found = harness.exposed(step, alone, lambda: next(sent), rounds=1, seconds_per_area=2.0)
    # to warm up and in the round, whole and without communication: 4 x 4 pairs of 2 heads
    assert slept == [64.0] * 4
    assert found["bytes"] == 30 and len(found["samples"]) == 1
    assert found["spread"] == (found["fraction"],) * 2


def test_rounds_begin_with_another_contender():
    found = [(i, name) for i, name in harness.turns("ab", 3)]
    assert found == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_program_writes_what_it_measured(tmp_path, monkeypatch):
    canaries, drawn = iter([1.0, 1.0, 1.0, 2.0, 1.0, 2.0]), []
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "canary", lambda: next(canaries))
    arguments = {"--rounds": (3, "rounds"), "--sizes": ([1, 2], None, [1, 2, 4]), "--quick": False}

    def program(*words, **options):
        monkeypatch.setattr("sys.argv", ["program", *words])
        measure = lambda found: vars(found)  # noqa: E731
        draw = lambda results, path: drawn.append(path.name)  # noqa: E731
        return harness.run("found", "A program.", arguments, measure, draw, **options)

    found = program("--sizes", "4")
    assert (found["rounds"], found["sizes"], found["quick"]) == (3, [4], False)
    assert found["canary_drift"] == 0 and drawn == ["found.png"]
    path = harness.results_file(tmp_path, "found")
    assert json.loads(path.read_text())["sizes"] == [4]
    with pytest.raises(harness.UnsteadyError):
        program("--rounds", "5")
    assert json.loads(path.read_text())["rounds"] == 3
    assert program("--no-write", "--quick", canary_is="recorded")["canary_drift"] == 1
    assert drawn == ["found.png"]


@pytest.mark.parametrize("window", [(-1, -1), (2, -1)])
def test_a_step_is_compared_with_fp64(monkeypatch, window):
    monkeypatch.setattr(steps.dist, "get_rank", lambda: 0)
    layout, attn = seqpar.Layout.contiguous([0, 7, 12], 1), seqpar.RingAttention(Comm("one", 0, 1))
    step = steps.Step(layout, 4, 8, kv_heads=2, window_size=window)
    assert step.error(attn) < 1e-6
    wrong = steps.Step(layout, 4, 8, kv_heads=2, window_size=window)
    wrong.operands[0].data += 1
    assert wrong.error(attn) > 1e-2
    with pytest.raises(SystemExit, match=r"ring has an error of 2\.0e-01: no times"):
        harness.check_error("ring", 0.2, 0.1)
