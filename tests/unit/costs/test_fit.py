"""The profile: what is fitted to a synthetic device predicts shapes that were not measured, and the
profiler times what it says."""

import numpy as np
import pytest
import torch

from seqpar.costs import fit
from seqpar.costs.cluster import Cluster
from seqpar.costs.profile import machine
from seqpar.costs.profile.calls import Setting, Shape
from seqpar.costs.profile.harness import PASSES
from tests.support.synthetic_device import (
    CALL,
    EDGE,
    LINEAR,
    Noise,
    device_seconds,
    made_profile,
    sample,
)

HELD_OUT = [
    Shape("full", 300, 1500),
    Shape("full", 3000, 700),
    Shape("causal", 700, 700),
    Shape("causal", 700, 5000),
    Shape("causal", 3000, 3000, 4),
    Shape("causal", 100, 100, 20),
    Shape("causal", 8000, 8000),
    Shape("window", 2000, 2499, 1, 500),
    Shape("window", 500, 3499, 1, 3000),
]


@pytest.mark.parametrize(("spread", "median", "worst"), [(0.0, 0.01, 0.05), (0.03, 0.05, 0.15)])
def test_shapes_that_were_not_measured_are_predicted(spread, median, worst):
    grid = fit.fit_grid(made_profile(spread))
    found = np.abs([fit.errors(grid, sample(shape, Noise(0.0))) for shape in HELD_OUT])
    assert np.median(found) < median and found.max() < worst, found.round(3)


def test_the_constants_of_the_device_are_found():
    grid = fit.fit_grid(made_profile())
    assert grid.edge == EDGE
    assert grid.call == pytest.approx(CALL)
    assert grid.forward[1, 2] == pytest.approx(device_seconds(Shape("full", 256, 1024), 0))


def test_linear_attention_is_a_plane_over_tokens_heads():
    recurrent = fit.fit_recurrent(made_profile())
    for name, expected in LINEAR.items():
        assert getattr(recurrent, name) == pytest.approx(expected, abs=1e-12)


def test_no_constant_of_linear_attention_is_negative():
    found = made_profile()
    for record in found["samples"]:
        if record["kind"] == "linear":  # many tokens take less than in proportion
            record["forward"] = [1e-3 * (record["rows"] * record["heads"]) ** 0.5]
            record["backward"] = [1e-8 * (record["rows"] * record["heads"]) ** 2]
    recurrent = fit.fit_recurrent(found)
    assert min(*recurrent.call, *recurrent.row) >= 0 and min(recurrent.token) > 0


def test_a_noisy_profile_stays_monotonic():
    grid = fit.fit_grid(made_profile(0.3))
    for table in (grid.forward, grid.backward, grid.window_forward, grid.window_backward):
        assert (np.diff(table, axis=0) >= 0).all() and (np.diff(table, axis=1) >= 0).all()


def test_new_memory_and_operators_take_what_was_measured():
    rates = {"new": [4e9, 5e9, 6e9], "kept": [2e10] * 3, "operators": [1e5, 5e5, 9e5]}
    measured = made_profile()
    measured["rates"] = measured["rates"] | rates
    device = fit.describe(measured)["device"]
    assert device.new_memory == pytest.approx(1 / 5e9 - 1 / 2e10)
    assert device.operator == pytest.approx(2e-6)
    before = fit.describe(made_profile())["device"]  # of a profile that has none of them
    assert (before.new_memory, before.operator) == (0.0, 0.0)
    assert Cluster.preset("1x1-h100").device.new_memory == 0.0


def test_cpus_and_gpus_are_described():
    cpu = Cluster(**fit.describe(made_profile()))
    assert (cpu.device.matmul_rate, cpu.device.matmul_share) == pytest.approx((2e11, 0.5))
    assert (cpu.device.itemsize, cpu.nics, cpu.ranks) == (4, 0, 2)
    assert not cpu.overlaps  # gloo's threads move messages on the ranks' cores
    profiled = made_profile() | {"fused": True, "device": "NVIDIA A100-SXM4-80GB", "devices": 8}
    gpu, preset = Cluster(**fit.describe(profiled)), Cluster.preset("1x8-a100")
    assert (gpu.inside, gpu.between, gpu.nics) == (preset.inside, preset.between, 8)
    assert gpu.overlaps and gpu.device.attention.fused and gpu.device.attention.tile == 128


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        (Shape("full", 5, 7), 35),
        (Shape("causal", 6, 6), 21),
        (Shape("causal", 3, 6), 4 + 5 + 6),
        (Shape("causal", 4, 4, 3), 30),
        (Shape("window", 5, 8, 1, 4), 20),
    ],
)
def test_the_profiler_times_a_samples_pairs(shape, area):
    slices = shape.slices()
    assert slices.area == area
    record = sample(shape, Noise(0.0))
    assert fit.sample_tasks(record).pairs.sum() == area


def test_the_profiler_keeps_every_round_of_each_shape():
    setting = Setting("cpu", torch.float32, 2, 16, "aten")
    shapes = [Shape("causal", 8, 8, 2), Shape("window", 4, 7, 1, 4)]
    with machine.one_thread():
        calls = machine.contenders(shapes, [32], setting)
        found = machine.take_turns(calls, setting.device, rounds=3)
    assert [record["kind"] for record in found] == [
        "causal",
        "window",
        "linear",
        "linear",
        "modules",
    ]
    assert [record["rows"] for record in found] == [8, 4, 32, 32, 32]
    for record in found:
        assert all(len(record[way]) == 3 and min(record[way]) > 0 for way in PASSES)
