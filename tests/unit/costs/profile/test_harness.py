"""What all benchmarks share: the canary, errors, and where results go."""

import json
import subprocess

import pytest
import torch

import seqpar
from seqpar.comm.messages.exchange import Comm
from seqpar.costs.profile import harness, machine


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


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert harness.environment()["commit"] == ""


def test_a_device_has_its_cores_whatever_the_threads():
    with machine.one_thread():
        assert harness.environment()["cores"] == harness.CORES


def test_progress_is_line_by_line_without_a_terminal(capsys):
    with harness.progress(2) as begin:
        for what in ("one", "two"):
            begin(what)
    assert capsys.readouterr().err.split("\n")[:2] == ["1 of 2: one", "2 of 2: two"]


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


def test_the_commit_is_seqpars_wherever_it_is_used(tmp_path, monkeypatch):
    here = harness.environment()["commit"]
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    assert harness.environment()["commit"] == here
