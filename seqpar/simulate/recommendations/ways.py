"""The ways to train: strategies on the layouts of one group, of a division or with servers."""

from __future__ import annotations

from collections.abc import Iterator

from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.simulate.candidates import STRATEGIES, Candidate, candidates
from seqpar.simulate.error_model import error_of
from seqpar.simulate.recommendations.divisions import Division
from seqpar.simulate.recommendations.recommendation import Recommendation
from seqpar.simulate.recommendations.search_space import (
    NamedLayout,
    layouts,
    numbers_of_servers,
    on_trainers,
    tasks_of,
    transport_of,
)

# The strategies that are tried with each division; others only with the best one.
_FIRST_STRATEGIES = ("ulysses", "ring", "all_gather", "usp")


def ways_in_one_group(lengths: Ints, costs: Costs) -> Iterator[Recommendation]:
    """Yield the ways to train in one group of all devices; equally fast ways keep this order."""
    cluster = costs.cluster
    for named in layouts(lengths, costs):
        yield from _in_place(candidates(cluster, cluster.ranks), named, costs, costs, None)
    for servers in numbers_of_servers(lengths, costs):
        named = on_trainers(lengths, cluster.ranks - servers)
        tasks = tasks_of(named.layout, servers)
        yield _way("disaggregated", {"servers": servers, "tasks": tasks}, named, costs, None)


def ways_of(division: Division, costs: Costs, others: bool = False) -> Iterator[Recommendation]:
    """Yield the ways of a division, by the strategies of most use or by all others."""
    context, ranks = division.divided.context, division.parallelism.context
    first = set(_FIRST_STRATEGIES)
    if context.model.kv_heads % ranks:  # ranks then send equal heads, or parts of documents
        first.discard("ulysses")
    strategies = [x for x in STRATEGIES if (x in first) != others]
    if ranks == 1:
        strategies = [] if others else strategies[:1]
    found = candidates(context.cluster, ranks, strategies)
    if costs.model.recurrence is not None:  # whose layers need one group of the context ranks
        found = [x for x in found if x.mesh is None]
    for named in layouts(division.lengths, context, division.largest) if found else ():
        yield from _in_place(found, named, context, costs, division)
        if ranks == 1:
            return


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
