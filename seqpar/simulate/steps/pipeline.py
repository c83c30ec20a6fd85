"""Simulate the stages of a pipeline: which micro-batch each computes when, and what it passes on.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(2021), section 2.2.1: 1F1B, one forward and one backward in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from seqpar.core.arguments import as_int, shown
from seqpar.costs.cluster import Cluster
from seqpar.costs.grid import Floats, as_amounts
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.program import Compute, Operators, Post, Program, Wait

PASSES = ("forward", "backward")


def pipeline(
    forward: ArrayLike,
    backward: ArrayLike,
    cluster: Cluster,
    nbytes: ArrayLike = 0,
    *,
    stages: int,
    schedule: str = "1f1b",
) -> Outcome:
    """Simulate a step of a pipeline, forward and backward of all micro-batches.

    The cluster's first ranks are the first stage, and so on; each rank passes what its stage makes
    of a micro-batch to the rank of the next stage that is at the same place, and gradients back.
    Messages travel beside what is computed, if the cluster's do, and take the links as all do.

    Args:
        forward, backward: (micro_batches,) seconds of a micro-batch in each stage, or (stages,
            micro_batches).
        cluster: the devices: `stages` divides its ranks.
        nbytes: (micro_batches,) bytes that a rank passes on, or one number; as many come back. Of 0
            the message takes the link's latency alone.
        stages: how many there are.
        schedule: "1f1b": a stage begins backward of a micro-batch as soon as it can, so stage s of
            S holds the activations of S − s micro-batches at most; or "gpipe": all forwards, and
            then all backwards, in the same order.

    Without communication, S equal stages and m equal micro-batches take (m + S − 1)·(f + b) in
    either schedule.

    Raises:
        ValueError: naming an argument that is wrong.
    """
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {shown(cluster)}")
    stages = as_int("stages", stages, 1)
    if cluster.ranks % stages:
        raise ValueError(f"stages must divide the cluster's {cluster.ranks} ranks, got {stages}")
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(f'schedule must be "1f1b" or "gpipe", got {shown(schedule)}')
    seconds = [_each(name, x, stages) for name, x in zip(PASSES, (forward, backward), strict=True)]
    if seconds[0].shape != seconds[1].shape:
        raise ValueError(
            f"backward must have forward's {seconds[0].shape[1]} micro-batches, got "
            f"{seconds[1].shape[1]}"
        )
    count = seconds[0].shape[1]
    sizes = as_amounts("nbytes", nbytes)
    if sizes.shape not in ((), (count,)):
        raise ValueError(f"nbytes must be one number or {count}, got {sizes.shape}")
    sizes = np.broadcast_to(sizes, count)
    each, prices, programs = cluster.ranks // stages, dict[int, float](), []
    for rank in range(cluster.ranks):
        stage = rank // each
        ends = rank - each if stage else None, rank + each if stage < stages - 1 else None
        program = Program(ordered=cluster.overlaps)
        for way, i in _order(stage, stages, count, schedule):
            compute = Compute(Operators(0, 0), f"stage {PASSES[way]}", i)
            prices[id(compute)] = float(seconds[way][stage, i])
            program.actions += _passed(rank, ends, way, i, int(sizes[i]), compute)
        sent = [x.number for x in program.actions if isinstance(x, Post) and x.sends]
        program.actions += [Wait(number) for number in sent]
        programs.append(program)
    return play(programs, cluster, pricing=lambda found: prices)


def _each(name: str, values: ArrayLike, stages: int) -> Floats:
    """Return (stages, micro_batches) seconds."""
    found = as_amounts(name, values)
    if found.ndim not in (1, 2) or not found.size or (found.ndim == 2 and len(found) != stages):
        expected = f"(micro_batches,) or ({stages}, micro_batches) seconds"
        raise ValueError(f"{name} must be {expected}, got shape {found.shape}")
    return np.broadcast_to(found, (stages, found.shape[-1]))


def _order(stage: int, stages: int, count: int, schedule: str) -> Iterator[tuple[int, int]]:
    """Yield (pass, micro-batch) in the order in which a stage computes."""
    ahead = min(count, stages - stage - 1) if schedule == "1f1b" else count
    yield from ((0, i) for i in range(ahead))
    for i in range(ahead, count):
        yield 0, i
        yield 1, i - ahead
    yield from ((1, i) for i in range(count - ahead, count))


def _passed(
    rank: int,
    ends: Sequence[int | None],
    way: int,
    number: int,
    nbytes: int,
    compute: Compute,
) -> list[Compute | Post | Wait]:
    """Return a micro-batch's pass through a stage: wait for it, compute, and pass it on."""
    source, target = ends[way], ends[1 - way]
    actions: list[Compute | Post | Wait] = []
    what = compute.what
    if source is not None:
        got = Post(4 * number + 2 * way, (), ((source, nbytes),), f"{source} to {rank}", what)
        actions += [got, Wait(got.number)]
    actions.append(compute)
    if target is not None:
        to = ((target, nbytes),)
        actions.append(Post(4 * number + 2 * way + 1, to, (), f"{rank} to {target}", what))
    return actions
