"""The predicted time and memory of one way to train."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seqpar.costs.costs import Costs
from seqpar.costs.memory import CHECKPOINTING
from seqpar.simulate.playback.outcome import limit_of
from seqpar.simulate.recommendations.recommendation import Recommendation, as_gb
from seqpar.simulate.steps.divided import divided_step
from seqpar.simulate.steps.steps import Step, step


def predicted(way: Recommendation, costs: Costs) -> Recommendation:
    """Return a way with its predictions, keeping activations in the fastest manner that fits."""
    fitting, least, capacity = [], np.inf, costs.cluster.device.memory
    manners = CHECKPOINTING[:-1] if way.servers else CHECKPOINTING
    for checkpointing in manners:
        if way.servers and checkpointing != manners[-1] and _least(way, costs) > capacity:
            continue  # it cannot fit, because servers exclude offloading
        try:
            simulated = _stepped(way, costs, checkpointing)
        except ValueError as refusal:
            return replace(way, checkpointing="", why_not=str(refusal))
        least = min(least, simulated.memory)
        if simulated.memory <= capacity:
            fitting.append(simulated)
            break  # more recomputation takes longer
        way = replace(
            way, memory=simulated.memory, bytes=simulated.bytes, longest=simulated.longest
        )
        if (offloaded := _offloaded(simulated, costs)) is not None:
            fitting.append(offloaded)
            if offloaded.seconds == simulated.seconds:
                break  # computation hides all copies
    if fitting:
        return min(fitting, key=lambda x: x.seconds)
    needs = f"needs {as_gb(least)} GB of {as_gb(capacity)}"
    short = f"{needs}: {as_gb(least - capacity)} GB too much"
    return replace(way, checkpointing=manners[-1], limit="memory", why_not=short)


def _least(way: Recommendation, costs: Costs) -> float:
    tokens, trainers = max(way.layout.tokens_per_rank), way.layout.ranks
    return float(costs.activation_bytes(tokens)) + costs.parameter_bytes(trainers)


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
            *(way.strategy, way.layout, division.divided, division.shares),
            most_tokens=division.most_tokens,
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
        longest=_longest(way, costs, memory),
        bytes=int(simulated.bytes.max()),
        limit=_limit(simulated, way.parallelism.pipeline > 1),
        step=simulated,
    )


def _longest(way: Recommendation, costs: Costs, memory: float) -> int:
    """Return the tokens that fit: memory other than the parameters grows with them."""
    if way.division is None:
        fixed, tokens = costs.parameter_bytes(way.layout.ranks), way.layout.tokens
    else:
        fixed = way.division.divided.parameter_bytes()
        tokens = int(way.division.lengths.sum())
    return int(tokens * max(0.0, costs.cluster.device.memory - fixed) / max(memory - fixed, 1.0))


def _offloaded(way: Recommendation, costs: Costs) -> Recommendation | None:
    """Return a way that fits by keeping activations in host memory; None if it still does not fit.

    The activations of all layers but two can move: they are copied out during forward and back
    during backward. With checkpointing, the remaining activations are few or in use. With servers,
    host memory already carries the tasks; with stages, several micro-batches are in use.
    """
    cluster, layers = costs.cluster, len(costs.model.layers)
    division, tokens = way.division, max(way.layout.tokens_per_rank)
    has_stages = way.parallelism.pipeline > 1
    if not cluster.overlaps or way.servers or has_stages or way.checkpointing != "none":
        return None
    if division is None:
        kept = float(costs.kept_bytes(tokens))
    else:
        kept = division.divided.activation_bytes(tokens, "none", 1)
    movable = kept * max(0, layers - 2) / layers
    short = way.memory - cluster.device.memory
    if short > movable:
        return None
    ratio = np.ceil(100 * short / movable) / 100  # rounded up to the printed digits
    memory = way.memory - ratio * movable
    # `step` copies the same share in every layer, so the share is spread over all of them.
    simulated = _stepped(way, costs, "none", float(ratio) * max(0, layers - 2) / layers)
    longest = _longest(way, costs, way.memory - movable)  # with all of them in host memory
    exposed = simulated.seconds - way.seconds
    limit = "communication" if exposed > way.seconds / 2 else way.limit
    return replace(simulated, offload=float(ratio), memory=memory, longest=longest, limit=limit)


def _limit(simulated: Step, has_stages: bool) -> str:
    busy = simulated.spent("busy")
    layers = simulated.seconds - simulated.head - simulated.optimizer
    mean = float(busy.mean())
    idle = layers - float(busy.max())
    if has_stages:  # which wait for each other more than for messages
        return limit_of(mean, float(busy.max()) - mean + idle, 0.0)
    return limit_of(mean, float(busy.max()) - mean, idle)
