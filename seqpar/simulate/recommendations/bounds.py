"""Lower bounds of the time of a way to train, which a few ranks give without simulating all."""

from __future__ import annotations

import numpy as np

from seqpar.costs.costs import Costs
from seqpar.layout.layout import Layout
from seqpar.simulate.recommendations.recommendation import Recommendation
from seqpar.simulate.steps.steps import least_step_seconds, least_trainer_seconds


def lower_bound(way: Recommendation, costs: Costs) -> float:
    """Return seconds that a step of this way takes at least; 0 after a refusal."""
    if way.servers:
        return least_trainer_seconds(way.layout, costs)
    try:
        return least_step_seconds(
            way.strategy, way.layout, costs, _busy_ranks(way.layout), **way.options
        )
    except ValueError:  # simulating the way gives the reason
        return 0.0


def _busy_ranks(layout: Layout) -> tuple[int, ...]:
    """Return the ranks that probably compute longest: at the ends, or of most (query, key) pairs.

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
    return tuple(sorted({0, layout.ranks - 1, *most}))
