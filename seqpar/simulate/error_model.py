"""The measured error of simulated seconds."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

import numpy as np

from seqpar.costs.cluster import Cluster
from seqpar.costs.fit import errors

FILE = "validated.json"  # written by `benchmarks.simulate.validation`


def error_of(cluster: Cluster) -> float:
    """Return the relative error of simulated seconds on a cluster, one standard deviation.

    The error is the root of the sum of two squares. The first term is the RMS error of simulated
    steps against measured steps: on cores, or on links whose messages are sent while devices
    compute. The second term is the RMS error of the cluster's costs for measured calls that the
    costs were not fitted to. Presets have no measurements, so the error of a preset does not
    include what its data sheet leaves out.
    """
    steps = validated()["links" if cluster.overlaps else "cores"]
    return float(np.hypot(steps, _error_of_costs(cluster)))


@cache
def validated() -> dict[str, float]:
    """Return the RMS errors of simulated steps, by the kind of machine that measured them."""
    return json.loads((files("seqpar.simulate") / FILE).read_text())


def _error_of_costs(cluster: Cluster) -> float:
    samples = [] if cluster.measured is None else cluster.measured.get("samples", [])
    try:
        # Causal calls are measured too, but are not nodes of the grid.
        causal = [errors(cluster.device.attention, x) for x in samples if x["kind"] == "causal"]
    except (KeyError, TypeError, ValueError) as error:  # the file was edited
        wrong = "cluster.measured has samples that are not a profile's"
        raise ValueError(f"{wrong}: {type(error).__name__}: {error}") from None
    return float(np.sqrt(np.mean(np.square(causal)))) if causal else 0.0
