"""What all benchmarks share: the canary, errors, and where results go."""

import json

import pytest
import torch

import seqpar
from benchmarks import harness
from seqpar.comm.messages.exchange import Comm


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
