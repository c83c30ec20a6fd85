"""Recommend: simulate the ways to train a model on a cluster, and rank them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from seqpar.comm.waiting import Progress
from seqpar.core.arguments import CuSeqlens, Ints, as_bool, as_lengths, shown
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.memory import CHECKPOINTING
from seqpar.costs.model import Model
from seqpar.simulate.candidates import candidates
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.outcome import AS_FAST, limit_of, slower_by, slower_for
from seqpar.simulate.recommendations.bounds import lower_bounds
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


def recommend(
    model: Model, cluster: Cluster, lengths: CuSeqlens, *, simulate_all: bool = False
) -> Recommendations:
    """Return the ways to train a model on these documents, fastest first, with reasons.

    Each strategy that the model's heads allow is simulated with three layouts: zigzag, contiguous,
    and the layout of `balance.plan`. All documents form one packed batch over all ranks.
    Parameters are sharded over all ranks and updated by Adam. Linear layers use the fastest
    transport for the layout. With attention servers, the remaining devices are trainers of whole
    documents; the number of servers follows from attention's share of the work.

    Before a way is simulated, one of its ranks is recorded, and then a few. If the computation or
    the messages of one of them take longer than the fastest step, by more than the error, the way
    is `excluded`: it is not simulated. With servers, the bound is the matrix products of the
    trainer with the most tokens.

    If a step does not fit into a device's memory, activations are copied to the host or recomputed,
    whichever is faster and fits; trainers with servers recompute them. Ways that still do not fit
    come last, with the missing memory in `why_not`.

    After 3 seconds, and then about every 10 seconds, the log gets a line with the number of
    simulated ways and the fastest of them. Ctrl-C ends the simulations after the current way, or
    the first one that fits: `partial` is then True, and ways that were not simulated come last. A
    second Ctrl-C ends the current way too. If no simulated way fits, it is a KeyboardInterrupt.

    Args:
        model: the model.
        cluster: the number and the speed of the ranks.
        lengths: (documents,) the tokens of each document.
        simulate_all: whether to simulate also the ways that would be excluded.

    Raises:
        ValueError: if `lengths` has no tokens.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model must be a Model, got {shown(model)}")
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {shown(cluster)}")
    lengths, simulate_all = as_lengths("lengths", lengths), as_bool("simulate_all", simulate_all)
    if not lengths.sum():
        raise ValueError("lengths must have a token")
    costs = Costs(cluster, model)
    ways = _simulated_or_excluded(list(_ways(lengths, costs)), costs, simulate_all)
    # Equally fast ways keep their order.
    ways.sort(
        key=lambda x: (x.why_not == NOT_SIMULATED, x.seconds == np.inf, x.excluded, x.seconds)
    )
    best = ways[0]
    return Recommendations([best, *(_compared(way, best) for way in ways[1:])])


def _simulated_or_excluded(
    ways: list[Recommendation], costs: Costs, simulate_all: bool
) -> list[Recommendation]:
    """Return the ways with their predictions, or with the reason why they have none.

    The way with the least lower bound comes first. Its bound is tightened before it is simulated.
    Once the least bound is too high, all remaining ways are excluded. An interrupt ends this once a
    way fits; if none does, the interrupt is raised.
    """
    simulated: dict[int, Recommendation] = {}
    best = ways[0]  # until one is simulated: its seconds are infinite
    bounds = [0.0] * len(ways)
    queue = [(0.0, number) for number in range(len(ways))]  # a heap
    progress = Progress(f"recommend looks for the best of {len(ways)} ways to train")
    with stop_on_interrupt("recommend") as interrupted:
        tighter = [iter(()) if simulate_all else lower_bounds(way, costs) for way in ways]
        stopped = False
        try:
            while queue and queue[0][0] <= best.seconds * (1 + best.error):
                if interrupted() and best.seconds < np.inf:
                    raise KeyboardInterrupt
                _, number = heappop(queue)
                # After an interrupt, the first way that fits is enough.
                bound = None if interrupted() else next(tighter[number], None)
                if bound is not None:
                    bounds[number] = bound
                    heappush(queue, (bound, number))
                else:
                    simulated[number] = _simulated(ways[number], costs)
                    best = min(simulated.values(), key=lambda x: x.seconds)
                    done = f"recommend has simulated {len(simulated)} of {len(ways)} ways to train"
                    fastest = f", fastest {best.name!r}" if best.seconds < np.inf else ""
                    progress.doing = done + fastest
                progress.tick()
        except KeyboardInterrupt:
            if not any(way.seconds < np.inf for way in simulated.values()):
                raise
            stopped = True
    return [
        simulated.get(number)
        or (
            replace(way, why_not=NOT_SIMULATED)
            if stopped
            else replace(way, excluded=True, seconds=bounds[number])
        )
        for number, way in enumerate(ways)
    ]


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
    if x.excluded:
        slower = slower_by(x.seconds, best.seconds)
        return replace(x, why_not=f"not simulated: one rank alone makes it {slower}")
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
