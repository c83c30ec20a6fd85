"""The profile: what is fitted to a synthetic device predicts shapes that were not measured, and the
profiler times what it says."""

import numpy as np
import pytest
import torch

from seqpar.bench import profile
from seqpar.costs import fit
from seqpar.costs.cluster import Cluster

CALL, ROW, PAIR, EDGE, HEADS = (5e-5, 1e-4), (2e-6, 5e-6), (8e-9, 2e-8), 256, 4
NODES = (64, 256, 1024, 4096)
HELD_OUT = [
    profile.Shape("full", 300, 1500),
    profile.Shape("full", 3000, 700),
    profile.Shape("causal", 700, 700),
    profile.Shape("causal", 700, 5000),
    profile.Shape("causal", 3000, 3000, 4),
    profile.Shape("causal", 100, 100, 20),
    profile.Shape("causal", 8000, 8000),
    profile.Shape("window", 2000, 2499, 1, 500),
    profile.Shape("window", 500, 3499, 1, 3000),
]


def device_seconds(shape, backward):
    """What a synthetic device takes: a call, and of each task its rows, pairs and cut tiles.

    A window doubles the pairs. A task is a piece of its own, as on a CPU.
    """
    offset = shape.keys - shape.rows
    if shape.kind == "full":
        pairs = shape.rows * shape.keys
    elif shape.kind == "causal":
        square = min(shape.rows**2, shape.rows * (shape.rows + 1) / 2 + EDGE * shape.rows)
        pairs = offset * shape.rows + square
    else:
        pairs = 2 * shape.rows * shape.window
    task = shape.rows * ROW[backward] + pairs * PAIR[backward]
    return CALL[backward] + shape.documents * task


def sample(shape, noise):
    """The raw samples of a shape on that device."""
    times = [[device_seconds(shape, back) * x for x in noise.draw()] for back in (False, True)]
    fields = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    return fields | {"forward": times[0], "backward": times[1]}


class Noise:
    """Five factors of a time, of which one is a process that came between."""

    def __init__(self, spread):
        self.generator, self.spread = np.random.default_rng(0), spread

    def draw(self):
        return [*(1 + self.spread * self.generator.standard_normal(4)), 3.0]


def made_profile(spread=0.0):
    """The profile of the synthetic device."""
    noise = Noise(spread)
    samples = [sample(shape, noise) for shape in profile.grid_shapes(NODES)]
    for tokens in NODES[1:]:
        record = {"kind": "linear", "rows": tokens}
        for back, way in enumerate(fit.WAYS):
            once, each = (1e-3, 2e-3)[back], (1e-6, 2e-6)[back]
            record[way] = [once + tokens * HEADS * each] * 5
        samples.append(record)
    return {
        "device": "synthetic",
        "devices": 2,
        "memory": 8 * 2**30,
        "dtype": "float32",
        "heads": HEADS,
        "head_dim": 64,
        "backend": "aten",
        "fused": False,
        "rates": {"matmul": [2e11] * 3, "feed_forward": [1e11] * 3, "copy": [1e10] * 3},
        "samples": samples,
    }


@pytest.mark.parametrize(("spread", "median", "worst"), [(0.0, 0.01, 0.05), (0.03, 0.05, 0.15)])
def test_shapes_that_were_not_measured_are_predicted(spread, median, worst):
    grid = fit.fit_grid(made_profile(spread))
    found = np.abs([fit.errors(grid, sample(shape, Noise(0.0))) for shape in HELD_OUT])
    assert np.median(found) < median and found.max() < worst, found.round(3)


def test_the_constants_of_the_device_are_found():
    grid = fit.fit_grid(made_profile())
    assert grid.edge == EDGE
    assert grid.call == pytest.approx(CALL)
    assert grid.forward[1, 2] == pytest.approx(device_seconds(profile.Shape("full", 256, 1024), 0))


def test_linear_attention_is_a_line():
    recurrent = fit.fit_recurrent(made_profile())
    assert recurrent.call == pytest.approx((1e-3, 2e-3))
    assert recurrent.token == pytest.approx((1e-6, 2e-6))


def test_a_noisy_profile_still_never_takes_less_for_more():
    grid = fit.fit_grid(made_profile(0.3))
    for table in (grid.forward, grid.backward, grid.window_forward, grid.window_backward):
        assert (np.diff(table, axis=0) >= 0).all() and (np.diff(table, axis=1) >= 0).all()


def test_what_a_cpu_and_a_gpu_are_described_as():
    cpu = Cluster(**fit.describe(made_profile()))
    assert (cpu.device.matmul_rate, cpu.device.matmul_share) == (2e11, 0.5)
    assert (cpu.device.itemsize, cpu.nics, cpu.ranks) == (4, 0, 2)
    profiled = made_profile() | {"fused": True, "device": "NVIDIA A100-SXM4-80GB", "devices": 8}
    gpu, preset = Cluster(**fit.describe(profiled)), Cluster.preset("1x8-a100")
    assert (gpu.inside, gpu.between, gpu.nics) == (preset.inside, preset.between, 8)
    assert gpu.device.attention.fused and gpu.device.attention.tile == 128


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        (profile.Shape("full", 5, 7), 35),
        (profile.Shape("causal", 6, 6), 21),
        (profile.Shape("causal", 3, 6), 4 + 5 + 6),
        (profile.Shape("causal", 4, 4, 3), 30),
        (profile.Shape("window", 5, 8, 1, 4), 20),
    ],
)
def test_the_profiler_times_the_pairs_that_a_sample_has(shape, area):
    slices = shape.slices()
    assert slices.area == area
    record = sample(shape, Noise(0.0))
    assert fit.sample_tasks(record).pairs.sum() == area


def test_the_profiler_runs_each_shape_and_keeps_every_round():
    setting = profile.Setting("cpu", torch.float32, 2, 16, "aten")
    shapes = [profile.Shape("causal", 8, 8, 2), profile.Shape("window", 4, 7, 1, 4)]
    with profile.one_thread():
        found = profile.time_shapes(shapes, [32], setting, rounds=3)
    assert [record["kind"] for record in found] == ["causal", "window", "linear"]
    assert [record["rows"] for record in found] == [8, 4, 32]
    for record in found:
        assert all(len(record[way]) == 3 and min(record[way]) > 0 for way in fit.WAYS)
