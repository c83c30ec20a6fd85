"""LASP-2: tokens/s of a linear model on 64 GPUs, and its speed over LASP-1's and Ring's.

A step takes a constant time for all lengths, plus our code's virtual time. The constant is fitted
to one published figure (`FITTED`). This library has no LASP-1 and no Ring for linear attention, so
a cost model (`linear_cost.py`) gives their differences.
"""

from __future__ import annotations

from functools import cache

from benchmarks.papers.linear_cost import Machine, compute, passes, seconds
from seqpar import Layout, simulate
from seqpar.balance import Cluster, Model
from seqpar.costs.model import Layer, Recurrence

LAYERS, HEADS, DIM = 16, 16, 128
# Llama 3.2 1B's shapes, with equal numbers of KV heads and query heads
MODEL = Model(
    "linear-llama3-1b",
    (Layer("linear", None, 8192, 8192),) * LAYERS,
    *(2048, HEADS, HEADS, DIM, 128256),
    tied=True,
    recurrence=Recurrence(HEADS, HEADS, DIM, DIM),
)
CLUSTER = Cluster.preset("8x8-a100")  # the preset names the sources of its figures
LINEAR_UTILIZATION = 0.3  # assumed share of the peak that the cost model's kernels reach
AREA_FLOPS = 4 * DIM  # of softmax attention for each pair of query and key
OURS = "LASP-2 all_gather"
LENGTHS = 2, 16, 64, 128, 256, 512, 1024  # Ki tokens over all ranks
FITTED, FITTED_RATE = 2, 1285  # Ki tokens and published tokens/s, to which a constant is fitted


@cache
def simulated(length: int, cluster: Cluster) -> simulate.Step:
    """Return the simulated step of one sequence of `length` Ki tokens."""
    layout = Layout.contiguous(length * 1024, cluster.ranks)
    # "ring" is the strategy of softmax layers, but the model has none.
    return simulate.step("ring", layout, cluster, MODEL)


def constant(cluster: Cluster) -> float:
    """Return the constant seconds of each step."""
    return FITTED * 1024 / FITTED_RATE - simulated(FITTED, cluster).seconds


def step(length: int, cluster: Cluster) -> float:
    """Return the seconds of a step of LASP-2."""
    return constant(cluster) + simulated(length, cluster).seconds


def machine(cluster: Cluster) -> Machine:
    """Return the cluster in the cost model's form."""
    return Machine(
        cluster.ranks,
        area=AREA_FLOPS / (cluster.device.matmul_rate * LINEAR_UTILIZATION),
        latency=cluster.between.latency,
        byte=1 / cluster.between.rate,
        ports=1,
        node=cluster.devices_per_node,
        inner_latency=cluster.inside.latency,
        inner_byte=1 / cluster.inside.rate,
    )


def added(contender: str, length: int, cluster: Cluster) -> float:
    """Return the additional seconds of a step over data parallel, by the cost model."""
    parts, of = passes(length * 1024 // cluster.ranks, HEADS, DIM), machine(cluster)
    return LAYERS * (seconds(contender, of, parts) - compute("data parallel", of, parts))


def over(contender: str, length: int, cluster: Cluster) -> float:
    """Return LASP-2's speed over another contender's."""
    more = added(contender, length, cluster) - added(OURS, length, cluster)
    return 1 + more / step(length, cluster)


def predict(mini: bool) -> dict[str, float]:
    """Return LASP-2's tokens/s and its speed over others."""
    cluster, found = Cluster.preset("2x2-a100") if mini else CLUSTER, {}
    for length in (FITTED, 64) if mini else LENGTHS:
        found[f"{length}K: LASP-2"] = length * 1024 / step(length, cluster)
    for name in ("LASP-1", "Ring"):
        for length in (512, 2048):
            found[f"{length}K: over {name}"] = over(name, length, cluster)
    for name, what in (("LASP-2 collective", "NCCL's collective"), ("LASP-2 scan", "scan")):
        found[f"2048K: over LASP-2 with {what}"] = over(name, 2048, cluster)
    return found
