"""Compute the description of a machine from a profile, which contains the timings of
`profile/machine.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from seqpar.costs.device import Device, Link, Recurrent
from seqpar.costs.devices import node_like
from seqpar.costs.grid import Floats, Grid, Tasks, causal_pairs
from seqpar.costs.profile.harness import PASSES, Profile, Sample

GPU_TILE_ROWS = 128  # query rows that a GPU kernel computes together
# Between processes of one machine, gloo was measured to send 1.7 to 2.3 GB/s in each direction.
SHARED_MEMORY = Link(100e-6, 2.0e9)


def sample_tasks(sample: Sample) -> Tasks:
    rows, keys, window = sample["rows"], sample["keys"], sample["window"]
    if sample["kind"] == "full":
        pairs = float(rows * keys)
    else:
        pairs = float(causal_pairs(keys - rows, keys, window))
    windowed = float(sample["kind"] == "window")  # even the first row has a whole window
    return Tasks.of(np.full(sample["documents"], rows), keys, pairs, windowed)


def seconds(sample: Sample) -> Floats:
    return np.array([np.median(sample[name]) for name in PASSES])


def fit_grid(profile: Profile) -> Grid:
    """Return the grid of the times of softmax attention in a profile.

    A grid is a table of the seconds of attention calls of different sizes. The grid's `call` is the
    constant time of a call: the time that is saved if one call computes two documents that would
    otherwise need two calls. The grid's `edge` is the number of keys that are added to each row of
    a causal call. It is the multiple of 16 for which the grid predicts the times of the causal
    samples with the smallest squared errors.
    """
    samples = [sample for sample in profile["samples"] if "keys" in sample]
    full = [sample for sample in samples if sample["kind"] == "full"]
    rows = np.unique([sample["rows"] for sample in full])
    keys = np.unique([sample["keys"] for sample in full])
    shape = rows.size, keys.size
    tables = [
        np.array([seconds(sample) for sample in samples if sample["kind"] == kind])
        for kind in ("full", "window")
    ]
    full_times, window_times = (ascending(times.T.reshape(2, *shape)) for times in tables)
    causal = [sample for sample in samples if sample["kind"] == "causal"]
    alone = next(x for x in causal if (x["rows"], x["documents"]) == (rows[0], 1))
    packed = next(x for x in causal if x["rows"] == rows[0] and x["documents"] > 1)
    count = packed["documents"]
    saved = (count * seconds(alone) - seconds(packed)) / (count - 1)
    call = np.clip(saved, 0, np.minimum(seconds(alone), full_times[:, 0, 0]))
    (forward, backward), (window_forward, window_backward) = full_times, window_times
    grid = Grid(
        *(rows, keys, forward, backward, window_forward, window_backward),
        profile["heads"],
        profile["head_dim"],
        call=(float(call[0]), float(call[1])),
        edge=0.0,
        tile=GPU_TILE_ROWS if profile["fused"] else 1,
        fused=profile["fused"],
    )
    edges = [replace(grid, edge=float(edge)) for edge in range(0, 1025, 16)]
    return min(edges, key=lambda x: np.square([errors(x, s) for s in causal]).sum())


def errors(grid: Grid, sample: Sample) -> Floats:
    tasks = sample_tasks(sample)
    predicted = [grid.together(tasks, grid.heads, grid.head_dim, back) for back in (False, True)]
    return np.concatenate(predicted) / seconds(sample) - 1


def ascending(tables: Floats) -> Floats:
    """Return tables of seconds in which values are increased so that no call takes less time than a
    smaller call.
    """
    return np.maximum.accumulate(np.maximum.accumulate(tables, -1), -2)


def fit_recurrent(profile: Profile) -> Recurrent:
    """Fit the seconds of linear attention by a linear function of calls, tokens and heads.

    The coefficients are at least 0, and minimise relative errors.
    """
    samples = [sample for sample in profile["samples"] if sample["kind"] == "linear"]
    tokens = np.array([sample["rows"] for sample in samples])
    heads = np.array([sample["heads"] for sample in samples])
    times = np.array([seconds(sample) for sample in samples]).T
    terms = np.stack([np.ones(tokens.size), tokens, tokens * heads], 1)
    fitted = np.zeros((2, 3))
    for constants, measured in zip(fitted, times, strict=True):
        kept = np.array([True, True, True])
        while True:
            scaled = terms[:, kept] / measured[:, None]
            solved = np.linalg.lstsq(scaled, np.ones(tokens.size), rcond=None)[0]
            if (solved >= 0).all():
                break
            kept[np.flatnonzero(kept)[np.argmin(solved * terms[-1, kept])]] = False
        constants[kept] = solved
    call, row, token = ((float(forward), float(backward)) for forward, backward in fitted.T)
    return Recurrent(call, row, token, profile["head_dim"])


def fit_modules(profile: Profile) -> float:
    """Return the FLOP/s that linear modules reach, as the median over all sizes and both passes."""
    samples = [sample for sample in profile["samples"] if sample["kind"] == "modules"]
    flops = np.array([[sample["flops"], 2 * sample["flops"]] for sample in samples])
    return float(np.median(flops / np.array([seconds(sample) for sample in samples])))


def fit_new_memory(profile: Profile) -> float:
    """Return the additional seconds for writing a byte of newly allocated memory, at least 0."""
    new, kept = (profile["rates"].get(name) for name in ("new", "kept"))
    if new is None or kept is None:  # profiles of GPUs and old profiles do not have these numbers
        return 0.0
    return max(0.0, float(1 / np.median(new) - 1 / np.median(kept)))


def describe(profile: Profile) -> dict[str, Any]:
    """Return the fields of a Cluster that a profile determines. A profile does not determine
    links.
    """
    matmul, copy = (float(np.median(profile["rates"][name])) for name in ("matmul", "copy"))
    reached = fit_modules(profile)
    device = Device(
        name=profile["device"],
        memory=profile["memory"],
        matmul_rate=max(matmul, reached),
        matmul_share=reached / max(matmul, reached),
        memory_bandwidth=copy,
        dtype=profile["dtype"],
        attention=fit_grid(profile),
        recurrent=fit_recurrent(profile),
        new_memory=fit_new_memory(profile),
        operator=1 / float(np.median(profile["rates"].get("operators", [np.inf]))),
    )
    if profile["fused"]:
        node = node_like(profile["device"])
        inside, between, host = node.links
        nics = node.nics
    else:
        inside = between = SHARED_MEMORY
        host = Link(0.0, copy / 2)
        nics = 0
    return {
        "name": "here",
        "nodes": 1,
        "devices_per_node": profile["devices"],
        "nics": nics,
        "device": device,
        "inside": inside,
        "between": between,
        "host": host,
        "overlaps": profile["fused"],
        "measured": profile,
    }
