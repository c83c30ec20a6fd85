"""LASP-2: tokens/s of a linear model on 64 GPUs, and its speed over LASP-1's and Ring's.

The model (`linear_cost.py`) of a step: a constant, which all lengths pay, 6 FLOPs a parameter and
token, and its layers' linear attention. The constant and the utilization of the GPUs are fitted to
two published points (`FITTED`); all else is assumed, from the sources named in this file.
"""

from __future__ import annotations

from benchmarks.papers.frame import Paper, Point
from benchmarks.papers.linear_cost import Machine, compute, passes, seconds
from seqpar.balance import Cluster

RANKS, LAYERS, HEADS, DIM = 64, 16, 16, 128
PARAMETERS = 1.24e9  # of Llama 3.2 1B; assumed to be as many with linear attention
CLUSTER = Cluster.preset("8x8-a100")  # its figures have their sources there
PEAK = CLUSTER.device.matmul_rate
LINEAR_UTILIZATION = 0.3  # of that peak by the kernels of linear attention, assumed
AREA_FLOPS = 4 * DIM  # of softmax attention for each pair of query and key
A100 = Machine(
    RANKS,
    area=AREA_FLOPS / (PEAK * LINEAR_UTILIZATION),
    latency=CLUSTER.between.latency,
    byte=1 / CLUSTER.between.rate,
    ports=1,
    node=CLUSTER.devices_per_node,
    inner_latency=CLUSTER.inside.latency,
    inner_byte=1 / CLUSTER.inside.rate,
)
TABLE = "throughput of Linear-Llama3-1B on 64 GPUs"
# LASP-2's tokens/s by Ki tokens over all ranks
PUBLISHED = {2: 1285, 16: 9305, 64: 34118, 128: 67344, 256: 130215, 512: 245353, 1024: 442221}
# LASP-2's speed over theirs
RATIOS = {"LASP-1": {512: 1.073, 2048: 1.152}, "Ring": {512: 1.178, 2048: 1.366}}
FITTED = 2, 1024  # the published points to which the constant and the utilization are fitted
PAPERS = "LASP-2 collective"


def attention(contender: str, length: int) -> float:
    """Return the seconds of all layers' linear attention in a step."""
    return LAYERS * seconds(contender, A100, passes(length * 1024 // RANKS, HEADS, DIM))


def arithmetic(length: int) -> float:
    """Return the seconds of all else at the peak."""
    return 6 * PARAMETERS * length * 1024 / RANKS / PEAK


def published_step(length: int) -> float:
    """Return the seconds of a step of LASP-2, as published."""
    return length * 1024 / PUBLISHED[length]


def fitted() -> tuple[float, float]:
    """Return the seconds that each step takes besides, and the utilization."""
    short, long = FITTED
    rest = [published_step(length) - attention(PAPERS, length) for length in FITTED]
    slowness = (rest[1] - rest[0]) / (arithmetic(long) - arithmetic(short))
    return rest[0] - slowness * arithmetic(short), 1 / slowness


def step(contender: str, length: int) -> float:
    """Return the seconds of a step by the model."""
    constant, utilization = fitted()
    return constant + arithmetic(length) / utilization + attention(contender, length)


def added(contender: str, length: int) -> float:
    """Return the seconds of a step that data parallel does not have."""
    parts = passes(length * 1024 // RANKS, HEADS, DIM)
    return attention(contender, length) - LAYERS * compute("data parallel", A100, parts)


def paper(mini: bool = False) -> Paper:
    """Return LASP-2's tokens/s and its speed over others."""
    points = []
    for length, published in PUBLISHED.items():
        rate, fitted_to = length * 1024 / step(PAPERS, length), length in FITTED
        points.append(Point(f"{length}K: LASP-2", "tokens/s", rate, published, TABLE, fitted_to))
    for name, ratios in RATIOS.items():
        for length, published in ratios.items():
            ours = step(name, length) / step(PAPERS, length)
            points.append(Point(f"{length}K: over {name}", "×", ours, published, TABLE))
    for name in ("LASP-2 all_gather", "LASP-2 scan", "data parallel"):
        ours = step(name, 2048) / step(PAPERS, 2048)
        points.append(Point(f"2048K: over {name}, ours", "×", ours))
    constant, utilization = fitted()
    return Paper(
        "lasp2",
        "[LASP-2](https://arxiv.org/abs/2502.07563)",
        f"Linear-Llama3-1B on {RANKS} A100, by the cost model of linear attention "
        "(`linear_cost.py`), which measured runs above were held to. All contenders have the "
        "right product and the same kernels: these baselines are fair. Theirs had no right "
        "product.",
        tuple(points),
        assumed=(
            f"A step's constant, {constant:.2f} s, and the utilization of its other arithmetic, "
            f"{utilization:.0%}, are fitted to {' and '.join(f'{x}K' for x in FITTED)}.",
            f"The kernels of linear attention reach {LINEAR_UTILIZATION:.0%} of the peak.",
        ),
        why=tuple(sentence for length in (64, 2048) for sentence in why(length)),
    )


def why(length: int) -> list[str]:
    """Return a sentence for each gap between the model and what was published at a length."""
    found = []
    base = step(PAPERS, length)
    if length in PUBLISHED:
        waits, computes = added(PAPERS, length), arithmetic(length) / fitted()[1]
        base = published_step(length)
        found.append(
            f"{length}K: {base:.2f} s a step were published, the model has "
            f"{step(PAPERS, length):.2f}, of which {waits * 1e3:.0f} ms are communication and "
            f"{computes * 1e3:.0f} arithmetic. Published steps grow from {FITTED[0]}K on, where "
            "ranks have little to compute: a cost of the framework that the constant does not have."
        )
    hops = LAYERS * 2 * (RANKS - 1)
    if length in RATIOS["LASP-1"]:
        published = (RATIOS["LASP-1"][length] - 1) * base / hops
        ours = added("LASP-1", length) / hops
        found.append(
            f"{length}K, LASP-1: the published difference is {published * 1e6:.0f} µs a hop, and "
            f"the model's hop takes {ours * 1e6:.0f}. A state is as large at any length and that "
            "difference is not, as if their LASP-1 worked on its tokens between hops."
        )
    if length in RATIOS["Ring"]:
        whole = RATIOS["Ring"][length] * base
        moved = hops * passes(length * 1024 // RANKS, HEADS, DIM)[0].block / 1e9
        carried = whole / A100.byte / 1e9
        found.append(
            f"{length}K, Ring: {RANKS - 1} hops of keys and values, and of q and dout, are "
            f"{moved:.0f} GB, and in the whole of the step, {whole:.1f} s, a link between nodes "
            f"carries {carried:.0f} at the assumed rate: there were fewer heads of keys than here, "
            "or fewer ranks around a ring."
        )
    return found
