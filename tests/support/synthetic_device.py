"""A synthetic device whose times are known, and its profile."""

import numpy as np

from seqpar.costs.profile import machine
from seqpar.costs.profile.harness import PASSES

CALL, ROW, PAIR, EDGE, HEADS = (5e-5, 1e-4), (2e-6, 5e-6), (8e-9, 2e-8), 256, 4
LINEAR = {"call": (1e-3, 2e-3), "row": (3e-7, 0.0), "token": (1e-6, 2e-6)}
NODES = (64, 256, 1024, 4096)  # the numbers of rows in the grid of shapes


def device_seconds(shape, backward):
    """Return the seconds that the device takes for a call.

    Each call takes a constant time. Each task, one for each document, takes time for its rows, its
    pairs and its cut tiles. A window doubles the pairs.
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
    """Return the raw samples of a shape on the device."""
    times = [[device_seconds(shape, back) * x for x in noise.draw()] for back in (False, True)]
    fields = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    return fields | {"forward": times[0], "backward": times[1]}


class Noise:
    """Draws five factors of a time. The last factor is as if another process had interrupted."""

    def __init__(self, spread):
        self.generator, self.spread = np.random.default_rng(0), spread

    def draw(self):
        return [*(1 + self.spread * self.generator.standard_normal(4)), 3.0]


def made_profile(spread=0.0):
    noise = Noise(spread)
    samples = [sample(shape, noise) for shape in machine.grid_shapes(NODES, (*NODES, 8192))]
    for tokens in NODES[1:]:
        for heads in (HEADS, 4 * HEADS):
            record = {"kind": "linear", "rows": tokens, "heads": heads}
            for back, way in enumerate(PASSES):
                call, row, each = (LINEAR[name][back] for name in ("call", "row", "token"))
                record[way] = [call + tokens * (row + heads * each)] * 5
            samples.append(record)
        modules = {"kind": "modules", "rows": tokens, "flops": 10**6 * tokens}
        samples.append(modules | {"forward": [1e-5 * tokens], "backward": [2e-5 * tokens]})
    return {
        "device": "synthetic",
        "devices": 2,
        "memory": 8 * 2**30,
        "dtype": "float32",
        "heads": HEADS,
        "head_dim": 64,
        "backend": "aten",
        "fused": False,
        "rates": {"matmul": [2e11] * 3, "copy": [1e10] * 3},
        "samples": samples,
    }
