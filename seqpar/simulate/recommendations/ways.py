"""List the ways to train (`Recommendation`) in one group, in a division, or with servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from seqpar.balance.methods.greedy import partition
from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import STRATEGIES, Candidate, candidates
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.stand_ins import choose_stand_ins
from seqpar.simulate.recommendations.divisions import (
    MAX_RANKS_AS_ONE,
    Division,
    NamedLayout,
    layouts,
)
from seqpar.simulate.recommendations.recommendation import Recommendation
from seqpar.simulate.steps.recorded_layers import ranks_alike
from seqpar.simulate.steps.training_step import step
from seqpar.strategies.recurrent import TRANSPORTS

# The strategies that are tried with each division. Other strategies are tried only with the best
# division.
_FIRST_STRATEGIES = ("ulysses", "ring", "all_gather", "usp")
# With more than 128 ranks, a mesh is tried only if its programs have at most this many messages in
# forward, because more messages would make a search too slow. The first limit applies if all ranks
# are recorded, and the second one if a few ranks are.
_MAX_MESSAGES, _MAX_MESSAGES_OF_FEW = 5000, 1500
_MAX_TASKS_PER_CALL = 16
_TASKS_PER_SERVER = 4


def ways_in_one_group(lengths: Ints, costs: Costs) -> Iterator[Recommendation]:
    cluster = costs.cluster
    for named in layouts(lengths, costs):
        yield from _in_place(candidates(cluster, cluster.ranks), named, costs, costs, None)
    for servers in numbers_of_servers(lengths, costs):
        named = on_trainers(lengths, cluster.ranks - servers)
        tasks = tasks_of(named.layout, servers)
        yield _way("disaggregated", {"servers": servers, "tasks": tasks}, named, costs, None)


def ways_of(division: Division, costs: Costs, others: bool = False) -> Iterator[Recommendation]:
    """Yield the configurations of a division with the strategies that are usually the fastest. With
    `others`, yield the configurations with all other strategies.

    With more than 128 ranks, only USP is tried.
    """
    context, ranks = division.divided.context, division.parallelism.context
    first = set(_FIRST_STRATEGIES)
    # Ulysses would send KV heads to several ranks, or cut documents.
    if context.model.kv_heads % ranks:
        first.discard("ulysses")
    strategies = [x for x in STRATEGIES if (x in first) != others]
    if ranks == 1:
        strategies = [] if others else strategies[:1]
    if ranks > MAX_RANKS_AS_ONE:
        strategies = [x for x in strategies if x == "usp"]
    found = candidates(context.cluster, ranks, strategies)
    if costs.model.recurrence is not None:  # linear layers need one group of the context ranks
        found = [x for x in found if x.mesh is None]
    for named in layouts(division.lengths, context, division.largest) if found else ():
        quick = found
        if ranks > MAX_RANKS_AS_ONE:
            quick = [x for x in found if _is_quick(x, named.layout, context)]
        if quick:
            yield from _in_place(quick, named, context, costs, division)
        if ranks == 1:
            return


def _is_quick(candidate: Candidate, layout: Layout, costs: Costs) -> bool:
    strategy, mesh = candidate
    assert mesh is not None
    played = np.unique(choose_stand_ins(strategy, layout.geometry, costs.cluster)).size
    recorded = max(1, played // ranks_alike(candidate, layout, costs.model))
    limit = _MAX_MESSAGES if played == layout.ranks else _MAX_MESSAGES_OF_FEW
    return recorded * sum(mesh) <= limit


def _in_place(
    found: list[Candidate],
    named: NamedLayout,
    context: Costs,
    costs: Costs,
    division: Division | None,
) -> Iterator[Recommendation]:
    transport = transport_of(named.layout, context)
    for strategy, mesh in found:
        options: dict[str, object] = {"transport": transport, "mesh": mesh}
        options = {name: option for name, option in options.items() if option is not None}
        yield _way(strategy, options, named, costs, division)


def _way(
    strategy: str,
    options: dict[str, object],
    named: NamedLayout,
    costs: Costs,
    division: Division | None,
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


def transport_of(layout: Layout, costs: Costs) -> str | None:
    """Return the fastest transport of linear layers, which is the way in which ranks exchange
    states. Return None for a model without linear layers.

    The choice does not depend on the strategy of softmax layers. A transport that fits into memory
    is preferred to any transport that does not.
    """
    linear = tuple(x for x in costs.model.layers if x.kind == "linear")[:1]
    if not linear or layout.ranks == 1:
        return None
    model, capacity = replace(costs.model, layers=linear), costs.cluster.device.memory
    ranked = []
    for transport in TRANSPORTS:
        try:
            one = step("ring", layout, costs.cluster, model, transport=transport)
        # Linear layers refuse the layout; the simulation of the way reports the reason.
        except ValueError:
            continue
        ranked.append((one.memory.max() > capacity, one.seconds, transport))
    return min(ranked, key=lambda x: x[:2])[2] if ranked else TRANSPORTS[0]


def numbers_of_servers(lengths: Ints, costs: Costs) -> list[int]:
    """Return the numbers of servers to try.

    The first number is the number of ranks times the fraction of all work that is softmax
    attention. With this number, trainers and servers take the same time: a trainer computes with
    one half of its documents while servers compute attention for the other half. The second number
    is half of the first number. There are never more trainers than documents.
    """
    ranks, model = costs.cluster.ranks, costs.model
    softmax = tuple(x for x in model.layers if x.kind != "linear")
    if ranks == 1 or not softmax:
        return []
    softmax_costs = Costs(costs.cluster, replace(model, layers=softmax))
    starts = np.zeros(lengths.size)
    attention, others = 0.0, 0.0
    for backward in (False, True):
        on_servers = float(softmax_costs.span_work(starts, lengths, backward).sum())
        attention += on_servers
        others += float(costs.span_work(starts, lengths, backward).sum()) - on_servers
        others += float(costs.tokenwise(lengths, backward).sum())
    share = ranks * attention / (attention + others)
    least = max(1, ranks - int(np.count_nonzero(lengths)))
    wanted = {round(share / 2), round(share)}
    return sorted({min(max(least, x), ranks - 1) for x in wanted})


def on_trainers(lengths: Ints, trainers: int) -> NamedLayout:
    """Return a layout of whole documents, with similar numbers of tokens on all trainers."""
    sets = partition(lengths.astype(np.float64), trainers)
    spans = [[(i, 0, int(lengths[i])) for i in sorted(x.tolist()) if lengths[i]] for x in sets]
    edges = np.r_[0, np.cumsum(lengths)]
    return NamedLayout("whole", Layout.from_spans(spans, edges), tuple(range(lengths.size)))


def tasks_of(layout: Layout, servers: int) -> int:
    """Return the number of tasks into which every trainer cuts each call of attention."""
    lengths = np.diff(layout.cu_seqlens).astype(np.float64)
    work = [sum(lengths[x.document] ** 2 for x in layout.spans(r)) for r in range(layout.ranks)]
    most = max(work) / sum(work)
    return int(np.clip(np.ceil(_TASKS_PER_SERVER * servers * most), 1, _MAX_TASKS_PER_CALL))
