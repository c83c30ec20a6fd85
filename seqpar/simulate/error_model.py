"""How far simulated seconds are from real ones, as far as anyone has measured it."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from seqpar.costs.cluster import Cluster
from seqpar.costs.fit import errors

FILE = "validated.json"  # which `benchmarks.simulate.validation` writes


def error_of(cluster: Cluster) -> float:
    """Return the error of simulated seconds on a cluster, one standard deviation, as a fraction.

    It is the root of the sum of two squares: the RMS error of simulated steps that were held
    against measured ones (on cores, or on links where messages travel while devices compute), and
    that of the cluster's own prices for the calls that were measured with them but not fitted. A
    preset has no measurements, so what its data sheet leaves out is not in it.
    """
    steps = validated()["links" if cluster.overlaps else "cores"]
    return float(np.hypot(steps, _error_of_prices(cluster)))


@cache
def validated() -> dict[str, float]:
    """Return the RMS errors of simulated steps, by where they were measured."""
    found: dict[str, float] = json.loads((files("seqpar.simulate") / FILE).read_text())
    return found


def by_place(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the RMS error by place, of rows of steps that were measured and simulated."""
    parts: dict[str, list[float]] = {}
    for row in rows:
        parts.setdefault(row["where"], []).append(row["error"])
    return {where: float(np.sqrt(np.mean(np.square(x)))) for where, x in parts.items()}


def _error_of_prices(cluster: Cluster) -> float:
    """Return the RMS error of the grid for causal calls, which are not among its nodes; else 0."""
    samples = (cluster.measured or {}).get("samples", [])
    causal = [errors(cluster.device.attention, x) for x in samples if x["kind"] == "causal"]
    return float(np.sqrt(np.mean(np.square(causal)))) if causal else 0.0
