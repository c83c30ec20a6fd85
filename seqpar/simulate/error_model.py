"""The measured error of simulated seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import TypedDict

import numpy as np

from seqpar.costs.cluster import Cluster
from seqpar.costs.fit import errors

FILE = "validated.json"  # written by `benchmarks.simulate.validation`


class SimulatedStepError(TypedDict):
    """The signed relative error of one simulated step, and where the step was measured."""

    where: str
    error: float


def error_of(cluster: Cluster) -> float:
    """Return the relative error of simulated seconds on a cluster, one standard deviation.

    It is the root of the sum of two squares. One is the RMS error of simulated steps against
    measured ones: on cores, or on links whose messages travel while devices compute. The other is
    the RMS error of the cluster's own costs for measured calls that were not fitted. Presets have
    no measurements, so their error leaves out whatever their data sheets leave out.
    """
    steps = validated()["links" if cluster.overlaps else "cores"]
    return float(np.hypot(steps, _error_of_costs(cluster)))


@cache
def validated() -> dict[str, float]:
    """Return the RMS errors of simulated steps, by the place where they were measured."""
    errors_by_place: dict[str, float] = json.loads((files("seqpar.simulate") / FILE).read_text())
    return errors_by_place


def by_place(rows: Iterable[SimulatedStepError]) -> dict[str, float]:
    """Return the RMS error by place of steps that were measured and simulated."""
    errors_by_place: dict[str, list[float]] = {}
    for row in rows:
        errors_by_place.setdefault(row["where"], []).append(row["error"])
    return {place: float(np.sqrt(np.mean(np.square(x)))) for place, x in errors_by_place.items()}


def _error_of_costs(cluster: Cluster) -> float:
    samples = [] if cluster.measured is None else cluster.measured.get("samples", [])
    # Causal calls are measured too, but are not nodes of the grid.
    causal = [errors(cluster.device.attention, x) for x in samples if x["kind"] == "causal"]
    return float(np.sqrt(np.mean(np.square(causal)))) if causal else 0.0
