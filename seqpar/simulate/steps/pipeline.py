"""Simulate a pipeline of stages: the order of micro-batches and the messages between stages.

The schedule 1F1B, which alternates one forward and one backward, is described by Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section
2.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from seqpar.core.arguments import as_choice, as_ranks
from seqpar.core.compiling import outside_graphs
from seqpar.costs.cluster import Cluster, as_cluster
from seqpar.costs.grid import Floats, as_amounts
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.program import Compute, Operators, Post, Program, Wait

PASSES = ("forward", "backward")


@outside_graphs
def pipeline(
    forward: ArrayLike,
    backward: ArrayLike,
    cluster: Cluster | str,
    nbytes: ArrayLike = 0,
    *,
    stages: int,
    schedule: str = "1f1b",
) -> Outcome:
    """Simulate one step of a pipeline: forward and backward of all micro-batches.

    The first `ranks / stages` ranks of the cluster are the first stage, and so on. A rank sends its
    result of each micro-batch to the rank with the same index in the next stage, and gradients to
    the rank with the same index in the previous stage. Messages share the links of the cluster.
    Messages overlap computation if the devices of the cluster can send messages while they compute.

    Args:
        forward, backward: (micro_batches,) or (stages, micro_batches). The seconds of each
            micro-batch. The first shape means that all stages take the same time.
        cluster: the devices, or the name of a preset. `stages` must divide the number of ranks.
        nbytes: (micro_batches,) or a single number. The bytes that a rank sends for each
            micro-batch, and receives as gradients. A message of 0 bytes still takes the link's
            latency.
        stages: the number of stages.
        schedule: with "1f1b", a stage starts each backward as soon as possible, so that stage s of
            S holds the activations of at most S − s micro-batches. With "gpipe", a stage computes
            all forwards, and then all backwards in the same order.

    Without communication, both schedules take (m + S − 1)·(f + b) for S equal stages and m equal
    micro-batches, whose forward takes f and whose backward takes b.

    Raises:
        ValueError: if an argument is wrong; the message names it.
    """
    cluster = as_cluster(cluster)
    stages = as_ranks("stages", stages)
    if cluster.ranks % stages:
        raise ValueError(f"stages must divide the cluster's {cluster.ranks} ranks, got {stages}")
    as_choice("schedule", schedule, ("1f1b", "gpipe"))
    seconds = [_by_stage("forward", forward, stages), _by_stage("backward", backward, stages)]
    if seconds[0].shape != seconds[1].shape:
        raise ValueError(
            f"backward must have forward's {seconds[0].shape[1]} micro-batches, got "
            f"{seconds[1].shape[1]}"
        )
    count = seconds[0].shape[1]
    sizes = _finite("nbytes", nbytes)
    if sizes.shape not in ((), (count,)):
        raise ValueError(
            f"nbytes must be one number, or one for each of {count} micro-batches, got shape "
            f"{sizes.shape}"
        )
    sizes = np.broadcast_to(sizes, count)
    ranks_per_stage = cluster.ranks // stages
    prices: dict[int, float] = {}
    programs = []
    for rank in range(cluster.ranks):
        stage = rank // ranks_per_stage
        before = rank - ranks_per_stage if stage else None
        after = rank + ranks_per_stage if stage < stages - 1 else None
        program = Program(ordered=cluster.overlaps)
        for direction, i in _order(stage, stages, count, schedule):
            what, size = f"stage {PASSES[direction]}", int(sizes[i])
            exchange = 4 * i + 2 * direction
            source, target = (after, before) if direction else (before, after)
            compute = Compute(Operators(0, 0), what, i)
            prices[id(compute)] = float(seconds[direction][stage, i])
            if source is not None:
                received = ((source, size),)
                program.actions.append(Post(exchange, (), received, f"{source} to {rank}", what))
                program.actions.append(Wait(exchange))
            program.actions.append(compute)
            if target is not None:
                sent = ((target, size),)
                program.actions.append(Post(exchange + 1, sent, (), f"{rank} to {target}", what))
        posts = [x for x in program.actions if isinstance(x, Post) and x.sends]
        program.actions += [Wait(x.number) for x in posts]
        programs.append(program)
    return play(programs, cluster, pricing=lambda calls: prices)


def _finite(name: str, values: ArrayLike) -> Floats:
    amounts = as_amounts(name, values)
    if np.isinf(amounts).any():
        raise ValueError(f"{name} must be finite, got inf")
    return amounts


def _by_stage(name: str, values: ArrayLike, stages: int) -> Floats:
    seconds = _finite(name, values)
    is_table = seconds.ndim == 2 and len(seconds) == stages
    if not seconds.size or not (seconds.ndim == 1 or is_table):
        expected = f"(micro_batches,) or ({stages}, micro_batches) seconds"
        raise ValueError(f"{name} must be {expected}, got shape {seconds.shape}")
    return np.broadcast_to(seconds, (stages, seconds.shape[-1]))


def _order(stage: int, stages: int, count: int, schedule: str) -> Iterator[tuple[int, int]]:
    """Yield (forward or backward, micro-batch) in the order in which a stage computes them."""
    ahead = min(count, stages - stage - 1) if schedule == "1f1b" else count
    yield from ((0, i) for i in range(ahead))
    for i in range(ahead, count):
        yield 0, i
        yield 1, i - ahead
    yield from ((1, i) for i in range(count - ahead, count))
