"""Recommend: simulate the ways to train a model on a cluster, and rank them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from seqpar.comm.waiting import Progress
from seqpar.core.arguments import CuSeqlens, Ints, as_bool, as_lengths, shown
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.fabric import Torus
from seqpar.costs.memory import CHECKPOINTING
from seqpar.costs.model import Model
from seqpar.simulate.candidates import STRATEGIES, candidates
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.outcome import AS_FAST, limit_of, slower_by, slower_for
from seqpar.simulate.recommendations.bounds import lower_bounds
from seqpar.simulate.recommendations.divisions import MAX_CONTEXT_RANKS, Division, divisions
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
from seqpar.simulate.steps.divided import divided_step
from seqpar.simulate.steps.steps import Step, step

# The strategies that are tried with each division; others only with the best one.
_FIRST_STRATEGIES = ("ulysses", "ring", "all_gather", "usp")


def recommend(
    model: Model,
    cluster: Cluster,
    lengths: CuSeqlens,
    *,
    parallelism: str = "context",
    simulate_all: bool = False,
) -> Recommendations:
    """Return the ways to train a model on these documents, fastest first, with reasons.

    Each strategy that the model's heads allow is simulated with three layouts: zigzag, contiguous,
    and the layout of `balance.plan`. By default all documents form one packed batch over all ranks.
    Parameters are sharded over all ranks and updated by Adam. Linear layers use the fastest
    transport for the layout. With attention servers, the remaining devices are trainers of whole
    documents; the number of servers follows from attention's share of the work.

    With `parallelism="all"`, devices are also divided into data, pipeline, tensor and context
    ranks, as `Recommendation.parallelism` says, and documents into data groups and micro-batches of
    similar work. Attention of the micro-batch with most work is simulated on its context ranks, at
    most 128; `simulate.steps.divided` says what is added. Divisions whose work alone, shared evenly
    by their context ranks, takes longer than the fastest step are left out.

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
        parallelism: "context", or "all" to choose data, pipeline, tensor and context parallelism.
        simulate_all: whether to simulate also the ways that would be excluded or left out.

    Raises:
        ValueError: if `lengths` has no tokens; if `parallelism` is "all" and the devices are cores
            that move messages themselves, or their nodes a torus.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model must be a Model, got {shown(model)}")
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {shown(cluster)}")
    lengths, simulate_all = as_lengths("lengths", lengths), as_bool("simulate_all", simulate_all)
    if not lengths.sum():
        raise ValueError("lengths must have a token")
    if parallelism not in ("context", "all"):
        raise ValueError(f'parallelism must be "context" or "all", got {shown(parallelism)}')
    if parallelism == "all" and not cluster.overlaps:
        raise ValueError(f'parallelism must be "context" on the cores of {cluster.name}, got "all"')
    if parallelism == "all" and isinstance(cluster.fabric, Torus):
        raise ValueError('parallelism must be "context" on a torus, got "all"')
    costs = Costs(cluster, model)
    divided = list(divisions(lengths, costs)) if parallelism == "all" else []
    # With too many devices to simulate as one group, divisions have smaller ones if any fits.
    as_one = cluster.ranks <= MAX_CONTEXT_RANKS or not divided
    # Among divisions, only the fastest counts. Otherwise, so do ways within the error.
    search = _Search(costs, simulate_all, 1.0 if divided else 1.0 + error_of(cluster))
    search.run(_ways(lengths, costs) if as_one else [], divided)
    ways = search.results()
    # Equally fast ways keep their order.
    ways.sort(
        key=lambda x: (x.why_not == NOT_SIMULATED, x.seconds == np.inf, x.excluded, x.seconds)
    )
    best = ways[0]
    return Recommendations([best, *(_compared(way, best) for way in ways[1:])])


class _Search:
    """Simulates the ways to train, the one with the least lower bound first.

    A way's bound is tightened before it is simulated. The ways of a division are added when its
    bound is the least. At first these are ways of few strategies. The fastest way's division gets
    all others, too. The search ends when all bounds are above the fastest step.

    Attributes:
        ways: all ways so far.
        simulated: by their numbers, those with predictions.
    """

    def __init__(self, costs: Costs, simulate_all: bool, close: float) -> None:
        self.ways: list[Recommendation] = []
        self.simulated: dict[int, Recommendation] = {}
        self.interrupted = False
        self._costs, self._simulate_all, self._close = costs, simulate_all, close
        self._bounds: list[float] = []
        self._tighter: list[Iterator[float]] = []
        self._queue: list[tuple[float, int, int | Division]] = []  # a heap of bounds
        self._order = count()
        self._best: Recommendation | None = None
        self._completed: set[int] = set()  # divisions whose ways are all known, by id

    def run(self, ways: Iterable[Recommendation], divided: Iterable[Division]) -> None:
        """Search until the best is known, or until an interrupt once a way fits.

        Raise the KeyboardInterrupt if none fits.
        """
        with stop_on_interrupt("recommend") as interrupted:
            self._add(ways)
            for division in divided:
                self._put(0.0 if self._simulate_all else division.least_seconds, division)
            progress = Progress(f"recommend looks for the best of {len(self._queue)} ways to train")
            try:
                while (following := self._next()) is not None:
                    if interrupted() and self._fastest < np.inf:
                        raise KeyboardInterrupt
                    # After an interrupt, the first way that fits is enough.
                    self._take(*following, tighten=not interrupted())
                    if self.simulated:
                        progress.doing = self._progress()
                    progress.tick()
            except KeyboardInterrupt:
                if self._fastest == np.inf:
                    raise
                self.interrupted = True

    def results(self) -> list[Recommendation]:
        """Return the ways with their predictions, or with the reason why they have none."""
        return [
            self.simulated.get(number)
            or (
                replace(way, why_not=NOT_SIMULATED)
                if self.interrupted
                else replace(way, excluded=True, seconds=self._bounds[number])
            )
            for number, way in enumerate(self.ways)
        ]

    @property
    def _fastest(self) -> float:
        return np.inf if self._best is None else self._best.seconds

    def _add(self, ways: Iterable[Recommendation], bound: float = 0.0) -> None:
        for way in ways:
            self._put(bound, len(self.ways))
            self.ways.append(way)
            self._bounds.append(bound)
            bounds = iter(()) if self._simulate_all else lower_bounds(way, self._costs)
            self._tighter.append(bounds)

    def _put(self, bound: float, item: int | Division) -> None:
        heappush(self._queue, (bound, next(self._order), item))

    def _next(self) -> tuple[float, int | Division] | None:
        if not self._queue or self._queue[0][0] > self._fastest * self._close:
            division = None if self._best is None else self._best.division
            if division is None or id(division) in self._completed:
                return None
            self._completed.add(id(division))
            self._add(_ways_of(division, self._costs, others=True), division.least_seconds)
            return self._next()
        bound, _, item = heappop(self._queue)
        return bound, item

    def _take(self, bound: float, item: int | Division, tighten: bool) -> None:
        if isinstance(item, Division):
            self._add(_ways_of(item, self._costs), bound)
            return
        tighter = next(self._tighter[item], None) if tighten else None
        if tighter is not None:
            self._bounds[item] = max(bound, tighter)
            self._put(self._bounds[item], item)
            return
        self.simulated[item] = found = _simulated(self.ways[item], self._costs)
        if found.seconds < self._fastest:
            self._best = found

    def _progress(self) -> str:
        done = f"recommend has simulated {len(self.simulated)} of {len(self.ways)} ways to train"
        return done if self._best is None else f"{done}, fastest {self._best.name!r}"


def _ways(lengths: Ints, costs: Costs) -> Iterator[Recommendation]:
    """Yield the ways to simulate; equally fast ways keep this order."""
    cluster = costs.cluster
    for named in layouts(lengths, costs):
        transport = transport_of(named.layout, costs)
        for strategy, mesh in candidates(cluster, cluster.ranks):
            options: dict[str, object] = {"transport": transport, "mesh": mesh}
            options = {name: option for name, option in options.items() if option is not None}
            yield _way(strategy, options, named, costs)
    for servers in numbers_of_servers(lengths, costs):
        named = on_trainers(lengths, cluster.ranks - servers)
        tasks = tasks_of(named.layout, servers)
        yield _way("disaggregated", {"servers": servers, "tasks": tasks}, named, costs)


def _way(
    strategy: str,
    options: dict[str, object],
    named: NamedLayout,
    costs: Costs,
    division: Division | None = None,
) -> Recommendation:
    recurrence = costs.model.recurrence
    return Recommendation(
        strategy,
        options,
        named.layout,
        named.name,
        device="cuda" if costs.cluster.overlaps else "cpu",
        documents=named.documents,
        error=error_of(costs.cluster),
        recurrence=None if recurrence is None else recurrence.kind,
        division=division,
    )


def _ways_of(division: Division, costs: Costs, others: bool = False) -> Iterator[Recommendation]:
    """Yield the ways of a division, by the strategies of most use or by all others."""
    context, ranks = division.divided.context, division.parallelism.context
    strategies = [x for x in STRATEGIES if (x in _FIRST_STRATEGIES) != others]
    if ranks == 1:
        strategies = [] if others else strategies[:1]
    found = candidates(context.cluster, ranks, strategies)
    if costs.model.recurrence is not None:  # whose layers need one group of the context ranks
        found = [x for x in found if x.mesh is None]
    for named in layouts(division.lengths, context, division.largest) if found else ():
        transport = transport_of(named.layout, context)
        for strategy, mesh in found:
            options: dict[str, object] = {"transport": transport, "mesh": mesh}
            options = {name: option for name, option in options.items() if option is not None}
            yield _way(strategy, options, named, costs, division)
        if ranks == 1:
            return


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
        fixed, tokens = costs.parameter_bytes(way.layout.ranks), way.layout.tokens
    else:
        simulated = divided_step(
            *(way.strategy, way.layout, division.divided, division.shares),
            most_tokens=division.most_tokens,
            checkpointing=checkpointing,
            offload=offload,
            **way.options,
        )
        fixed, tokens = division.divided.parameter_bytes(), int(division.lengths.sum())
    memory = float(simulated.memory.max())
    free = costs.cluster.device.memory - fixed  # memory other than `fixed` grows with the tokens
    longest = int(tokens * max(0.0, free) / max(memory - fixed, 1.0))
    return replace(
        way,
        checkpointing=checkpointing,
        seconds=simulated.seconds,
        memory=memory,
        longest=longest,
        bytes=int(simulated.bytes.max()),
        limit=_limit(simulated, way.parallelism.pipeline > 1),
        step=simulated,
    )


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
    longest = int(way.longest * way.memory / (way.memory - movable))
    memory = way.memory - ratio * movable
    # `step` copies the same share in every layer, so the share is spread over all of them.
    simulated = _stepped(way, costs, "none", float(ratio) * max(0, layers - 2) / layers)
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
