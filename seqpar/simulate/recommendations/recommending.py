"""Recommend: simulate what could train a model on a cluster, and rank it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from seqpar.core.arguments import CuSeqlens, Ints, as_lengths, shown
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.memory import CHECKPOINTING
from seqpar.costs.model import Model
from seqpar.simulate.candidates import candidates
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.outcome import AS_FAST, limit_of, slower_by, slower_for
from seqpar.simulate.recommendations.recommendation import Recommendation, Recommendations, as_gb
from seqpar.simulate.recommendations.search_space import (
    layouts,
    numbers_of_servers,
    on_trainers,
    tasks_of,
    transport_of,
)
from seqpar.simulate.steps.steps import Step, step


def recommend(model: Model, cluster: Cluster, lengths: CuSeqlens) -> Recommendations:
    """Return ways to train a model on documents, the fastest first, each with why it is not better.

    Each strategy that the model's heads allow is simulated (`seqpar.simulate.step`) with each
    layout: zigzag, contiguous, and that of `balance.plan`. All documents are in one packed batch
    over all ranks, over which parameters are sharded too; Adam updates them. Linear layers have the
    transport that is fastest on the layout. With attention servers, the other devices are trainers
    that have whole documents; how many servers there are follows from the share that attention has
    of the work. Where a step does not fit into a device's memory, activations are copied to the
    host or recomputed, whichever takes less time and fits; trainers with servers recompute them.
    What fits with neither comes last, and says by how much it does not.

    Args:
        model: `seqpar.balance.Model`.
        cluster: `seqpar.balance.Cluster`: how many ranks there are, and what they can do.
        lengths: (documents,) tokens of each.

    Raises:
        ValueError: if there are no tokens.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model must be a Model, got {shown(model)}")
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {shown(cluster)}")
    lengths = as_lengths("lengths", lengths)
    if not lengths.sum():
        raise ValueError("lengths must have a token")
    costs = Costs(cluster, model)
    found = [_simulated(way, costs) for way in _ways(lengths, costs)]
    found.sort(key=lambda x: x.seconds)  # what is as fast stays in order
    best = found[0]
    return Recommendations([best, *(_compared(x, best) for x in found[1:])])


def _ways(lengths: Ints, costs: Costs) -> Iterator[Recommendation]:
    """Yield the ways that are simulated, in the order in which equals are ranked."""
    cluster, error = costs.cluster, error_of(costs.cluster)
    recurrence = costs.model.recurrence
    kind = None if recurrence is None else recurrence.kind
    device = "cuda" if cluster.overlaps else "cpu"
    made: dict[str, Any] = {"device": device, "error": error, "recurrence": kind}
    for name, layout, documents in layouts(lengths, costs):
        transport = transport_of(layout, costs)
        common: dict[str, Any] = {} if transport is None else {"transport": transport}
        for strategy, mesh in candidates(cluster, cluster.ranks):
            options = common | ({} if mesh is None else {"mesh": mesh})
            yield Recommendation(strategy, options, layout, name, documents=documents, **made)
    for servers in numbers_of_servers(lengths, costs):
        name, layout, documents = on_trainers(lengths, cluster.ranks - servers)
        options = {"servers": servers, "tasks": tasks_of(layout, servers)}
        yield Recommendation("disaggregated", options, layout, name, documents=documents, **made)


def _simulated(way: Recommendation, costs: Costs) -> Recommendation:
    """Return a way with what it takes, and the fastest manner of keeping activations that fits."""
    fitting, least, capacity = [], np.inf, costs.cluster.device.memory
    manners = CHECKPOINTING[:-1] if way.servers else CHECKPOINTING
    for checkpointing in manners:
        if way.servers and checkpointing != manners[-1] and _least(way, costs) > capacity:
            continue  # it does not fit, and nothing waits elsewhere
        try:
            found = _stepped(way, costs, checkpointing)
        except ValueError as refusal:
            return replace(way, checkpointing="", why_not=str(refusal))
        least = min(least, found.memory)
        if found.memory <= capacity:
            fitting.append(found)
            break  # what recomputes more takes longer
        way = replace(way, memory=found.memory, bytes=found.bytes, longest=found.longest)
        if (offloaded := _offloaded(found, costs)) is not None:
            fitting.append(offloaded)
            if offloaded.seconds == found.seconds:
                break  # the copies are hidden
    if fitting:
        return min(fitting, key=lambda x: x.seconds)
    needs = f"needs {as_gb(least)} GB of {as_gb(capacity)}"
    short = f"{needs}: {as_gb(least - capacity)} GB too much"
    return replace(way, checkpointing=manners[-1], limit="memory", why_not=short)


def _least(way: Recommendation, costs: Costs) -> float:
    """Return the bytes that a trainer has in any case, if nothing is recomputed."""
    tokens, trainers = max(way.layout.tokens_per_rank), way.layout.ranks
    return float(costs.activation_bytes(tokens)) + costs.parameter_bytes(trainers)


def _stepped(
    way: Recommendation, costs: Costs, checkpointing: str, offload: float = 0.0
) -> Recommendation:
    """Return a way with what it takes with such checkpointing, before anything waits elsewhere."""
    found = step(
        *(way.strategy, way.layout, costs.cluster, costs.model),
        checkpointing=checkpointing,
        sharding="full",
        offload=offload,
        optimizer=True,
        **way.options,
    )
    memory = float(found.memory.max())
    fixed = costs.parameter_bytes(way.layout.ranks)
    free = costs.cluster.device.memory - fixed  # all else grows with the tokens
    longest = int(way.layout.tokens * max(0.0, free) / max(memory - fixed, 1.0))
    return replace(
        way,
        checkpointing=checkpointing,
        seconds=found.seconds,
        memory=memory,
        longest=longest,
        bytes=int(found.bytes.max()),
        limit=_limit(found),
        step=found,
    )


def _offloaded(way: Recommendation, costs: Costs) -> Recommendation | None:
    """Return a way that fits since activations wait in host memory; None if that is not enough.

    All but two layers' may. They are copied beside forward, and back beside backward. With
    checkpointing the rest is little, or in use, and with servers host memory is what tasks go
    through.
    """
    cluster, layers = costs.cluster, len(costs.model.layers)
    if not cluster.overlaps or way.servers or way.checkpointing != "none":
        return None
    kept = float(costs.kept_bytes(max(way.layout.tokens_per_rank)))
    movable = kept * max(0, layers - 2) / layers
    short = way.memory - cluster.device.memory
    if short > movable:
        return None
    ratio = np.ceil(100 * short / movable) / 100  # as it is printed
    longest = int(way.longest * way.memory / (way.memory - movable))
    memory = way.memory - ratio * movable
    # all layers copy as much: what the last two do not is spread over the others
    found = _stepped(way, costs, "none", float(ratio) * max(0, layers - 2) / layers)
    exposed = found.seconds - way.seconds
    limit = "communication" if exposed > way.seconds / 2 else way.limit
    return replace(found, offload=float(ratio), memory=memory, longest=longest, limit=limit)


def _limit(found: Step) -> str:
    """Return what takes most of the time."""
    busy = found.spent("busy")
    layers = found.seconds - found.head - found.optimizer
    mean = float(busy.mean())
    return limit_of(mean, float(busy.max()) - mean, layers - float(busy.max()))


def _compared(x: Recommendation, best: Recommendation) -> Recommendation:
    """Return a recommendation that says why it is not the best."""
    if x.step is None or best.step is None or x.seconds == np.inf:
        return x
    slower = slower_by(x.seconds, best.seconds)
    close = " (within the error)" if x.seconds / best.seconds < 1 + x.error else ""
    if (x.checkpointing, x.offload > 0) != (best.checkpointing, best.offload > 0):
        return replace(x, why_not=f"{slower}: it keeps activations by {x.keeping!r}{close}")
    waiting, busy = (
        float(x.step.spent(kind).max() - best.step.spent(kind).max())
        for kind in ("waiting", "busy")
    )
    if slower == AS_FAST:
        return replace(x, why_not=slower)
    return replace(x, why_not=f"{slower}: {slower_for(waiting, busy)}{close}")
