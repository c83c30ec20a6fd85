"""The benchmark of virtual ranks, in miniature on a CPU."""

import json

import pytest
import torch

from benchmarks import harness
from benchmarks.kernels import virtual_ranks


def test_it_measures_kernels_memory_and_a_training_step(tmp_path, monkeypatch):
    words = ["virtual_ranks", "--tokens", "128", "--ranks", "2", "--heads", "2", "1"]
    words += ["--dim", "16", "--rounds", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(virtual_ranks, "STRATEGIES", ("ring",))
    monkeypatch.setattr(virtual_ranks, "device_rates", lambda: (1e10, {torch.float32: 1e15}))
    assert virtual_ranks.main() == 0
    path = harness.results_file(tmp_path, "virtual-ranks")
    found = {x.pop("workload"): x for x in json.loads(path.read_text())["results"]}
    assert not any("refused" in x for x in found.values())
    kernels = found["kernels: 128 tokens, 2 ranks"]
    assert set(kernels) == {"ring", "ulysses"} and all(x["both"] > 0 for x in kernels.values())
    layouts = {name: x for name, x in found.items() if name.startswith("layouts: ")}
    assert len(layouts) == 12 and all(x["backward"]["efficiency"] > 0 for x in layouts.values())
    memory = found["memory: 128 tokens, 2 ranks"]
    assert all(x["simulated"] > 0 and x["measured"] is None for x in memory.values())
    training = found["training: 128 tokens, 2 ranks"]
    assert all(0 < training[name]["mfu"] < 1 for name in virtual_ranks.KERNELS)
    monkeypatch.setattr(virtual_ranks, "kernels", None)  # all has been measured
    assert virtual_ranks.main() == 0
    monkeypatch.setattr("sys.argv", [*words, "--rounds", "2"])
    with pytest.raises(ValueError, match="of other options: rounds is 1 there"):
        virtual_ranks.main()
    monkeypatch.setattr("sys.argv", words)
    here = harness.environment()
    monkeypatch.setattr(virtual_ranks.harness, "environment", lambda: here | {"commit": "other"})
    with pytest.raises(ValueError, match="of another machine: commit"):
        virtual_ranks.main()


def test_what_was_refused_is_tried_again(tmp_path, monkeypatch):
    words = ["virtual_ranks", "--tokens", "128", "--ranks", "2", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    works = {"one": dict}
    monkeypatch.setattr(virtual_ranks, "workloads", lambda options: works)

    def fails():
        raise RuntimeError("no room")

    works["two"] = fails
    assert virtual_ranks.main() == 1
    works["two"] = dict
    assert virtual_ranks.main() == 0
    found = json.loads(harness.results_file(tmp_path, "virtual-ranks").read_text())["results"]
    assert found == [{"workload": "one"}, {"workload": "two"}]


def test_the_target_is_128k_tokens_on_8_ranks():
    result = {"workload": "kernels: 131072 tokens, 8 ranks"}
    result |= {"ring": {"both": 0.98}, "ulysses": {"both": 0.9}}
    assert virtual_ranks.reached([result]) == {"ring": True, "ulysses": False}
    assert virtual_ranks.reached([{"workload": "kernels: 4096 tokens, 8 ranks"}]) == {}
