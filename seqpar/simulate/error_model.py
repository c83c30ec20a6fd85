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
    """Return the standard deviation of the relative error of simulated seconds on a cluster.

    The result is the root of the sum of the squares of two errors. The first error is the RMS error
    of simulated steps against measured steps, on machines of the cluster's kind. The second error
    is the RMS error of the cluster's costs against measured calls to which the costs were not
    fitted. Presets have no measurements, so for presets the second error is 0.
    """
    steps = validated()["links" if cluster.overlaps else "cores"]
    return float(np.hypot(steps, _error_of_costs(cluster)))


@cache
def validated() -> dict[str, float]:
    return json.loads((files("seqpar.simulate") / FILE).read_text())


def _error_of_costs(cluster: Cluster) -> float:
    samples = [] if cluster.measured is None else cluster.measured.get("samples", [])
    try:
        # Causal calls are measured too, but the costs are not fitted to them.
        causal = [errors(cluster.device.attention, x) for x in samples if x["kind"] == "causal"]
    except (KeyError, TypeError, ValueError) as error:  # somebody edited the file
        wrong = "cluster.measured has samples that are not a profile's"
        raise ValueError(f"{wrong}: {type(error).__name__}: {error}") from None
    return float(np.sqrt(np.mean(np.square(causal)))) if causal else 0.0
