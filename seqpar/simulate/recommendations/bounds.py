"""Lower bounds of the time of a way to train, which a few ranks give without simulating all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from seqpar.costs.costs import Costs
from seqpar.layout.layout import Layout
from seqpar.simulate.recommendations.recommendation import Recommendation
from seqpar.simulate.steps.steps import least_step_seconds, least_trainer_seconds


def lower_bounds(way: Recommendation, costs: Costs) -> Iterator[float]:
    """Yield seconds that a step of this way takes at least: quickly, then tighter; 0 if refused.

    The first bound is from the one rank that probably computes longest, the second from a few.
    """
    if way.servers:
        yield least_trainer_seconds(way.layout, costs)
        return
    division = way.division
    try:
        busy = _busy_ranks(way.layout)
        for ranks in dict.fromkeys((busy[:1], busy)):
            if division is None:
                yield least_step_seconds(way.strategy, way.layout, costs, ranks, **way.options)
            else:
                context = division.divided.context
                micro_batch = least_step_seconds(
                    way.strategy, way.layout, context, ranks, **way.options
                )
                yield division.least_seconds_with(micro_batch)
    except ValueError:  # simulating the way gives the reason
        yield 0.0


def _busy_ranks(layout: Layout) -> tuple[int, ...]:
    """Return the ranks that probably compute longest: of most (query, key) pairs, or at the ends.

    Strategies move either keys or queries, so that pairs of a rank's queries or of its keys count.
    """
    lengths = np.diff(layout.cu_seqlens)
    pairs_of_queries, pairs_of_keys = np.zeros(layout.ranks), np.zeros(layout.ranks)
    for rank in range(layout.ranks):
        documents, starts, stops = layout.geometry.holdings[rank].columns
        pairs = (stops * stops - starts * starts) / 2  # causal, up to the diagonal
        pairs_of_queries[rank] = pairs.sum()
        pairs_of_keys[rank] = ((stops - starts) * lengths[documents] - pairs).sum()
    most = int(pairs_of_queries.argmax()), int(pairs_of_keys.argmax())
    return tuple(dict.fromkeys((*most, 0, layout.ranks - 1)))
