"""Recommend: simulate the ways to train a model on a cluster, and rank them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from seqpar.comm.waiting import Progress
from seqpar.core.arguments import CuSeqlens, Ints, as_lengths, shown
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.memory import CHECKPOINTING
from seqpar.costs.model import Model
from seqpar.simulate.candidates import candidates
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.outcome import AS_FAST, limit_of, slower_by, slower_for
from seqpar.simulate.recommendations.interrupts import stop_on_interrupt
from seqpar.simulate.recommendations.recommendation import (
    NOT_SIMULATED,
    Recommendation,
    Recommendations,
    as_gb,
)
from seqpar.simulate.recommendations.search_space import (
    NamedLayout,
    layouts,
    numbers_of_servers,
    on_trainers,
    tasks_of,
    transport_of,
)
from seqpar.simulate.steps.steps import Step, step


def recommend(model: Model, cluster: Cluster, lengths: CuSeqlens) -> Recommendations:
    """Return the ways to train a model on these documents, fastest first, with reasons.

    Each strategy that the model's heads allow is simulated with three layouts: zigzag, contiguous,
    and the layout of `balance.plan`. All documents form one packed batch over all ranks.
    Parameters are sharded over all ranks and updated by Adam. Linear layers use the fastest
    transport for the layout. With attention servers, the remaining devices are trainers of whole
    documents; the number of servers follows from attention's share of the work.

    If a step does not fit into a device's memory, activations are copied to the host or recomputed,
    whichever is faster and fits; trainers with servers recompute them. Ways that still do not fit
    come last, with the missing memory in `why_not`.

    After 3 seconds, and then about every 10 seconds, the log gets a line with the number of
    simulated ways and the fastest of them. Ctrl-C ends the simulations after the current way:
    `partial` is then True, and ways that were not simulated come last. A second Ctrl-C ends the
    current way too. If no simulated way fits, a KeyboardInterrupt is raised.

    Args:
        model: the model.
        cluster: the number and the speed of the ranks.
        lengths: (documents,) the tokens of each document.

    Raises:
        ValueError: if `lengths` has no tokens.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model must be a Model, got {shown(model)}")
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {shown(cluster)}")
    lengths = as_lengths("lengths", lengths)
    if not lengths.sum():
        raise ValueError("lengths must have a token")
    costs = Costs(cluster, model)
    ways = list(_ways(lengths, costs))
    simulated = _all_simulated(ways, costs)
    simulated.sort(key=lambda way: way.seconds)  # a stable sort
    best = simulated[0]
    others = [_compared(way, best) for way in simulated[1:]]
    others += [replace(way, why_not=NOT_SIMULATED) for way in ways[len(simulated) :]]
    return Recommendations([best, *others])


def _all_simulated(ways: list[Recommendation], costs: Costs) -> list[Recommendation]:
    """Return the simulated ways; after an interrupt these are the first ones.

    If none of them fits, the interrupt is raised.
    """
    simulated: list[Recommendation] = []
    progress = Progress(f"recommend simulates {len(ways)} ways to train")
    with stop_on_interrupt("recommend") as interrupted:
        try:
            for way in ways:
                simulated.append(_simulated(way, costs))
                if interrupted() and len(simulated) < len(ways):
                    raise KeyboardInterrupt
                best = min(simulated, key=lambda x: x.seconds)
                done = f"recommend has simulated {len(simulated)} of {len(ways)} ways to train"
                fastest = f", fastest {best.name!r}" if best.seconds < np.inf else ""
                progress.doing = done + fastest
                progress.tick()
        except KeyboardInterrupt:
            if not any(way.seconds < np.inf for way in simulated):
                raise
    return simulated


def _ways(lengths: Ints, costs: Costs) -> Iterator[Recommendation]:
    """Yield the ways to simulate; equally fast ways keep this order."""
    cluster, error = costs.cluster, error_of(costs.cluster)
    recurrence = None if costs.model.recurrence is None else costs.model.recurrence.kind

    def way(strategy: str, options: dict[str, object], named: NamedLayout) -> Recommendation:
        return Recommendation(
            strategy,
            options,
            named.layout,
            named.name,
            device="cuda" if cluster.overlaps else "cpu",
            documents=named.documents,
            error=error,
            recurrence=recurrence,
        )

    for named in layouts(lengths, costs):
        transport = transport_of(named.layout, costs)
        for strategy, mesh in candidates(cluster, cluster.ranks):
            options: dict[str, object] = {"transport": transport, "mesh": mesh}
            options = {name: option for name, option in options.items() if option is not None}
            yield way(strategy, options, named)
    for servers in numbers_of_servers(lengths, costs):
        named = on_trainers(lengths, cluster.ranks - servers)
        tasks = tasks_of(named.layout, servers)
        yield way("disaggregated", {"servers": servers, "tasks": tasks}, named)


def _simulated(way: Recommendation, costs: Costs) -> Recommendation:
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
    simulated = step(
        *(way.strategy, way.layout, costs.cluster, costs.model),
        checkpointing=checkpointing,
        sharding="full",
        offload=offload,
        optimizer=True,
        **way.options,
    )
    memory = float(simulated.memory.max())
    fixed = costs.parameter_bytes(way.layout.ranks)
    free = costs.cluster.device.memory - fixed  # memory other than `fixed` grows with the tokens
    longest = int(way.layout.tokens * max(0.0, free) / max(memory - fixed, 1.0))
    return replace(
        way,
        checkpointing=checkpointing,
        seconds=simulated.seconds,
        memory=memory,
        longest=longest,
        bytes=int(simulated.bytes.max()),
        limit=_limit(simulated),
        step=simulated,
    )


def _offloaded(way: Recommendation, costs: Costs) -> Recommendation | None:
    """Return a way that fits by keeping activations in host memory; None if it still does not fit.

    The activations of all layers but two can move: they are copied out during forward and back
    during backward. With checkpointing, the remaining activations are few or in use. With servers,
    host memory already carries the tasks.
    """
    cluster, layers = costs.cluster, len(costs.model.layers)
    if not cluster.overlaps or way.servers or way.checkpointing != "none":
        return None
    kept = float(costs.kept_bytes(max(way.layout.tokens_per_rank)))
    movable = kept * max(0, layers - 2) / layers
    short = way.memory - cluster.device.memory
    if short > movable:
        return None
    ratio = np.ceil(100 * short / movable) / 100  # rounded up to the printed digits
    longest = int(way.longest * way.memory / (way.memory - movable))
    memory = way.memory - ratio * movable
    # `step` copies the same share in every layer, so the share is spread over all of them.
    simulated = _stepped(way, costs, "none", float(ratio) * max(0, layers - 2) / layers)
    exposed = simulated.seconds - way.seconds
    limit = "communication" if exposed > way.seconds / 2 else way.limit
    return replace(simulated, offload=float(ratio), memory=memory, longest=longest, limit=limit)


def _limit(simulated: Step) -> str:
    busy = simulated.spent("busy")
    layers = simulated.seconds - simulated.head - simulated.optimizer
    mean = float(busy.mean())
    return limit_of(mean, float(busy.max()) - mean, layers - float(busy.max()))


def _compared(x: Recommendation, best: Recommendation) -> Recommendation:
    """Return a recommendation with the reason why it is not the best."""
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
