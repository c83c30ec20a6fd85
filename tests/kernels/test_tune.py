"""The tuner, and what importing the kernels must not do."""

import json
import os
import subprocess
import sys

import pytest
import torch
from seqpar.kernels.flash_attention import configs, tune

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    configs.forget()
    yield tmp_path
    configs.forget()


def test_the_fastest_is_kept_on_disk_and_chosen(folder, monkeypatch):
    """`choose` gives the fastest, also from a fresh read of the file.

    Times are made up so that one neighbour wins.
    """
    name = configs.architecture(DEVICE)
    faster = tune.candidates(name, "single", 64, "forward")[1]
    original = tune.call
    monkeypatch.setattr(
        tune,
        "call",
        lambda kind, config, *x: (original(kind, config, *x), setattr(tune, "last", config))[0],
    )
    monkeypatch.setattr(
        tune,
        "seconds",
        lambda function, *x: (function(), 1.0 if tune.last == faster else 2.0)[1],
        raising=False,
    )
    q = torch.randn(1, 48, 1, 16, device=DEVICE)
    shipped = configs.choose("forward", q, q)
    best = tune.tune(16, torch.float32, DEVICE, tokens=48, heads=1)
    assert len(best) == 3 and (folder / "flash_attention.json").is_file()
    configs.forget()
    assert configs.choose("forward", q, q) == faster != shipped
    assert (
        configs.choose("forward", q.half(), q.half())
        == configs.TABLE[configs.architecture(DEVICE), "half", 64][0]
    )


def test_a_kernel_is_kept_before_the_next_one_is_tuned(folder, monkeypatch):
    """A tuner that is stopped has lost only the kernel that it was at."""

    def stopped(kind, config, *operands):
        if kind == "backward_kv":
            raise KeyboardInterrupt
        return lambda: None

    monkeypatch.setattr(tune, "call", stopped)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(16, torch.float32, DEVICE, 16, 1)
    (kept,) = json.loads((folder / "flash_attention.json").read_text())
    assert kept == configs.tuning_key("forward", DEVICE, "single", 64)


def test_what_another_version_kept_is_left_out(folder):
    """The file may be of a version whose configurations had other fields."""
    key = configs.tuning_key("forward", DEVICE, "single", 64)
    old = {"rows": 16, "columns": 16, "warps": 4, "stages": 1, "tma": False, "specialise": False}
    configs.tuning_file().write_text(json.dumps({key: old | {"cut": None}}))
    q = torch.randn(1, 48, 1, 16, device=DEVICE)
    assert (
        configs.choose("forward", q, q)
        == configs.TABLE[configs.architecture(DEVICE), "single", 64].forward
    )


def test_a_configuration_that_fails_is_passed_over(folder, monkeypatch):
    def fails(kind, config, *operands):
        if config != getattr(configs.TABLE[configs.architecture(DEVICE), "single", 64], kind):
            raise RuntimeError("out of shared memory")
        return lambda: None

    monkeypatch.setattr(tune, "call", fails)
    assert set(tune.tune(16, torch.float32, DEVICE, 16, 1).values()) <= set(
        configs.TABLE[configs.architecture(DEVICE), "single", 64]
    )


@pytest.mark.parametrize("kind", configs.KernelConfigs._fields)
def test_candidates_on_hopper_were_compiled_ahead_of_time(kind):
    """The shipped one comes first, each comes once, and not all neighbours are among them."""
    found = tune.candidates("sm_90", "half", 128, kind)
    shipped = getattr(configs.TABLE["sm_90", "half", 128], kind)
    assert found[0] == shipped and len(set(found)) == len(found)
    assert set(tune.neighbours(shipped)) - set(found)


def test_forward_candidates_have_pairs_of_tile_sizes_with_descriptors():
    found = tune.candidates("sm_90", "half", 128, "forward")
    pairs = {(x.tile_rows, x.block_columns) for x in found if x.tma}
    assert pairs >= {(128, 128), (128, 64), (64, 64)}


def test_candidates_that_were_not_compiled_are_neighbours():
    shipped = configs.TABLE["sm_80", "half", 128].forward
    assert tune.candidates("sm_80", "half", 128, "forward") == [shipped, *tune.neighbours(shipped)]


@pytest.mark.exhaustive
def test_importing_needs_no_gpu_and_leaves_nothing(tmp_path):
    environment = os.environ | {
        "SEQPAR_CACHE": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(tmp_path),
    }
    environment.pop("TRITON_INTERPRET", None)
    script = "import seqpar, seqpar.kernels.flash_attention, seqpar.softmax.backends.triton"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=100)
    assert list(tmp_path.iterdir()) == []
