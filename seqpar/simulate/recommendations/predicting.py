"""Predict the time and memory of one way to train.

A *way* is one configuration for training (`Recommendation`). A *manner* is how activations are kept
until backward: in device memory, in host memory, or not at all, so that they are recomputed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seqpar.costs.costs import CHECKPOINTING, Costs
from seqpar.simulate.playback.outcome import limit_of
from seqpar.simulate.recommendations.recommendation import Recommendation, as_gb
from seqpar.simulate.steps.divided import MicroBatches, divided_step
from seqpar.simulate.steps.step_memory import StepMemory
from seqpar.simulate.steps.training_step import Step, step


def too_large(way: Recommendation, costs: Costs) -> Recommendation | None:
    """Return the configuration `way` with the reason why it does not fit into memory, or None if it
    may fit.

    The temporary tensors of attention are not counted.
    """
    least = min(_least_memory(way, costs, x) for x in _manners(way))
    if least <= costs.cluster.device.memory:
        return None
    return _unfit(replace(way, memory=least), costs, least, "needs at least")


def predicted(way: Recommendation, costs: Costs) -> Recommendation:
    """Return a configuration with its predicted time and memory.

    Activations can be kept, offloaded or recomputed. The fastest of these three methods that fits
    into memory is assumed. If none of the three methods fits, the method that needs the least
    memory is assumed.
    """
    fitting, least, capacity = [], np.inf, costs.cluster.device.memory
    manners = _manners(way)
    for checkpointing in manners:
        if checkpointing != manners[-1] and _least_memory(way, costs, checkpointing) > capacity:
            continue
        try:
            simulated = _stepped(way, costs, checkpointing)
        except ValueError as refusal:
            return replace(way, checkpointing="", why_not=str(refusal))
        least = min(least, simulated.memory)
        if simulated.memory <= capacity:
            fitting.append(simulated)
            break  # other manners recompute more, and take longer
        way = replace(
            way, memory=simulated.memory, bytes=simulated.bytes, longest=simulated.longest
        )
        if (offloaded := _offloaded(simulated, costs)) is not None:
            fitting.append(offloaded)
            if offloaded.seconds == simulated.seconds:
                break  # copies to the host take no extra time, so other manners cannot be faster
    if fitting:
        return min(fitting, key=lambda x: x.seconds)
    return _unfit(way, costs, least, "needs")


def _manners(way: Recommendation) -> tuple[str, ...]:
    return CHECKPOINTING[:-1] if way.servers else CHECKPOINTING


def _unfit(way: Recommendation, costs: Costs, least: float, needs: str) -> Recommendation:
    capacity = costs.cluster.device.memory
    lacks = f"{as_gb(capacity)}: {as_gb(least - capacity)} GB too much"
    return replace(
        way,
        checkpointing=_manners(way)[-1],
        limit="memory",
        why_not=f"{needs} {as_gb(least)} GB of {lacks}",
    )


def _least_memory(way: Recommendation, costs: Costs, checkpointing: str) -> float:
    """Return the bytes on a device if all activations that can be offloaded are offloaded."""
    division, tokens = way.division, np.array([float(max(way.layout.tokens_per_rank))])
    if division is None:
        held = StepMemory.over_layers(costs, checkpointing, way.layout.ranks)
    else:
        held = division.divided.memory(checkpointing, division.shares.size)
        tokens *= division.most_tokens / way.layout.tokens
    offload = float(_can_offload(way, costs, checkpointing))
    return float(held.on(tokens, np.zeros(1)).peak(offload).max())


def _can_offload(way: Recommendation, costs: Costs, checkpointing: str) -> bool:
    """Return whether activations can be offloaded. The result is False in three cases:

    * With checkpointing, because few activations remain, or because backward needs them at once.
    * With servers, because the copies of tasks already use the link to host memory.
    * With pipeline stages, because a device holds the activations of several micro-batches.
    """
    has_stages = way.parallelism.pipeline > 1
    return costs.cluster.overlaps and not (way.servers or has_stages) and checkpointing == "none"


def _stepped(
    way: Recommendation, costs: Costs, checkpointing: str, offload: float = 0.0
) -> Recommendation:
    division = way.division
    if division is None:
        simulated = step(
            *(way.strategy, way.layout, costs.cluster, costs.model),
            checkpointing=checkpointing,
            sharding="full",
            offload=offload,
            optimizer=True,
            **way.options,
        )
    else:
        simulated = divided_step(
            way.strategy,
            MicroBatches(way.layout, division.shares, division.most_tokens),
            division.divided,
            checkpointing=checkpointing,
            offload=offload,
            **way.options,
        )
    memory = float(simulated.memory.max())
    return replace(
        way,
        checkpointing=checkpointing,
        seconds=simulated.seconds,
        memory=memory,
        longest=_longest(way, costs, simulated),
        bytes=int(simulated.bytes.max()),
        limit=_limit(simulated, way.parallelism.pipeline > 1),
        step=simulated,
    )


def _longest(way: Recommendation, costs: Costs, simulated: Step, offload: float = 0.0) -> int:
    """Return the largest number of tokens for which a configuration fits into the memory of a
    device.
    """
    division = way.division
    tokens = way.layout.tokens if division is None else int(division.lengths.sum())
    return int(tokens * simulated.held.growth(costs.cluster.device.memory, offload))


def _offloaded(way: Recommendation, costs: Costs) -> Recommendation | None:
    """Return a configuration with activations in host memory, or None if it does not fit into
    memory with offloading.
    """
    if not _can_offload(way, costs, way.checkpointing):
        return None
    assert way.step is not None
    least = way.step.held.least_offload(costs.cluster.device.memory)
    if least > 1:
        return None
    ratio = float(np.ceil(100 * least) / 100)  # rounded up to two digits, as in the printed table
    # `step` copies the same fraction in every layer, but two layers are not offloaded. The fraction
    # is therefore spread over all layers.
    layers = len(costs.model.layers)
    simulated = _stepped(way, costs, "none", ratio * max(0, layers - 2) / layers)
    assert simulated.step is not None
    # Assuming that all tensors that can be moved are in host memory.
    longest = _longest(way, costs, simulated.step, 1.0)
    memory = float(simulated.step.held.peak(ratio).max())
    exposed = simulated.seconds - way.seconds
    limit = "communication" if exposed > way.seconds / 2 else way.limit
    return replace(simulated, offload=ratio, memory=memory, longest=longest, limit=limit)


def _limit(simulated: Step, has_stages: bool) -> str:
    busy = simulated.spent("busy")
    layers = simulated.seconds - simulated.head - simulated.optimizer
    mean = float(busy.mean())
    idle = layers - float(busy.max())
    if has_stages:  # with stages, waiting is mostly for other stages, not for messages
        return limit_of(mean, float(busy.max()) - mean + idle, 0.0)
    return limit_of(mean, float(busy.max()) - mean, idle)
