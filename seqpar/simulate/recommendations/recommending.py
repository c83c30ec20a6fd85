"""Recommend: simulate the ways to train a model on a cluster, and rank these ways."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seqpar.core.arguments import CuSeqlens, as_bool, as_lengths, shown
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import beside_the_caller
from seqpar.costs.cluster import Cluster, as_cluster
from seqpar.costs.costs import Costs
from seqpar.costs.device import Torus
from seqpar.costs.model import Model, as_model
from seqpar.simulate.error_model import error_of
from seqpar.simulate.playback.outcome import AS_FAST, slower_by, slower_for
from seqpar.simulate.playback.playing import require_simpy
from seqpar.simulate.recommendations.divisions import MAX_RANKS_AS_ONE, divisions
from seqpar.simulate.recommendations.recommendation import (
    NOT_SIMULATED,
    Recommendation,
    Recommendations,
)
from seqpar.simulate.recommendations.searching import Search
from seqpar.simulate.recommendations.ways import ways_in_one_group


@outside_graphs
@beside_the_caller()
def recommend(
    model: Model | str,
    cluster: Cluster | str,
    lengths: CuSeqlens,
    *,
    parallelism: str = "context",
    simulate_all: bool = False,
) -> Recommendations:
    """Return the ways to train a model on these documents, fastest first, with reasons.

    `python -m seqpar plan` prints the result.

    Each strategy that the model's heads allow is simulated with three layouts: zigzag, contiguous,
    and the layout of `balance.plan`. By default all documents form one packed batch over all ranks.
    Parameters are sharded over all ranks and updated by Adam. Linear layers use the fastest
    transport for the layout. With attention servers, the remaining devices are trainers, each with
    whole documents. The number of servers follows from the fraction of the work that is attention.

    With `parallelism="all"`, devices are also divided into data, pipeline, tensor and context
    ranks, as `Recommendation.parallelism` says, and documents into data groups and micro-batches of
    similar work. Only the attention of the micro-batch with the most work is simulated, on its
    context ranks. Formulas give the time of all other work (`simulate.steps.divided`). Groups have
    at most 2,048 context ranks. Groups of more than 128 ranks are tried with USP. A division is
    left out if it would take longer than the fastest step even with equal work on all context
    ranks.

    A *way* is one strategy with one layout and one division. Before a way is simulated, a lower
    bound on its time is computed from the computations and messages of one rank, and then of a few
    ranks. If the computation or the messages of one of these ranks take longer than the fastest
    step so far, the way is not simulated (`excluded`). Without divisions, a way is excluded only if
    its bound exceeds the fastest step by more than the error of the simulation. With servers, the
    bound is the time of the matrix products on the trainer with the most tokens.

    If a step does not fit into a device's memory, activations are copied to the host or recomputed.
    If both methods make the step fit, the faster method is used. With servers, activations are
    recomputed. Ways that still do not fit come last, those with the least missing memory first;
    `why_not` says how much memory is missing. If the parameters and activations of a way are
    already too large, the way is not simulated, and `memory` is the memory of parameters and
    activations only.

    After 3 seconds, and then about every 10 seconds, a line is logged with the number of simulated
    ways and the fastest way. The first Ctrl-C ends the search as soon as a simulated way fits, and
    a second Ctrl-C ends it at once. `partial` is then True, and ways that were not simulated come
    last. If no way that fits was simulated before the second Ctrl-C, a KeyboardInterrupt is raised.

    Args:
        model: the model, or the name of a preset, such as "llama-8b".
        cluster: the number and the speed of the ranks, or the name of a preset, such as "4x8-h100".
        lengths: (documents,) the number of tokens of each document.
        parallelism: "context", or "all" to choose data, pipeline, tensor and context parallelism.
        simulate_all: whether to simulate the ways that would otherwise be excluded or left out.

    Raises:
        ValueError: if `lengths` has no tokens. With `parallelism="all"`, also if the devices are
            cores that send messages themselves, if the nodes form a torus, or if there are more
            than 128 devices and the parameters do not fit with any division that can be simulated.
        ImportError: if simpy is not installed. The extra "plan" installs it.
    """
    model, cluster = as_model(model), as_cluster(cluster)
    lengths, simulate_all = as_lengths("lengths", lengths), as_bool("simulate_all", simulate_all)
    if not lengths.sum():
        raise ValueError(f"lengths must have at least one token in all, got {shown(lengths)}")
    if parallelism not in ("context", "all"):
        raise ValueError(f'parallelism must be "context" or "all", got {shown(parallelism)}')
    if parallelism == "all" and not cluster.overlaps:
        raise ValueError(f'parallelism must be "context" on the cores of {cluster.name}, got "all"')
    if parallelism == "all" and isinstance(cluster.fabric, Torus):
        raise ValueError('parallelism must be "context" on a torus, got "all"')
    require_simpy()
    costs = Costs(cluster, model)
    divided = list(divisions(lengths, costs)) if parallelism == "all" else []
    as_one = parallelism == "context" or cluster.ranks <= MAX_RANKS_AS_ONE
    # With divisions, only the fastest way is needed. Without divisions, all ways are needed whose
    # times differ from the fastest one by less than the error.
    search = Search(costs, simulate_all, 1.0 if divided else 1.0 + error_of(cluster))
    search.run(ways_in_one_group(lengths, costs) if as_one else [], divided)
    ways = search.results()
    if not ways:
        raise ValueError(
            f"cluster: {model.name} and {np.count_nonzero(lengths)} documents cannot be divided "
            f"over {cluster.ranks} devices in a way that fits into memory and can be simulated in "
            'seconds: pass parallelism="context", which simulates one group of all devices'
        )
    ways.sort(key=_rank)  # equally good ways keep their order
    best = ways[0]
    ranked = [best, *(_compared(way, best) for way in ways[1:])]
    return Recommendations(ranked, search.interrupted)


def _rank(x: Recommendation) -> tuple[bool, bool, bool, float, bool, float]:
    """Return the sort key of a way to train, which is one configuration. The best way has the
    smallest key.

    Ways that fit into memory come first, ordered by seconds. Ways that were excluded by a lower
    bound come next, followed by ways that do not fit. Ways that were not simulated because of an
    interrupt come last.
    """
    impossible = x.seconds == np.inf
    lacking = x.memory if impossible and not np.isnan(x.memory) else np.inf
    return x.why_not == NOT_SIMULATED, impossible, x.excluded, x.seconds, not x.longest, lacking


def _compared(x: Recommendation, best: Recommendation) -> Recommendation:
    if x.excluded:
        slower = slower_by(x.seconds, best.seconds)
        return replace(x, why_not=f"not simulated: at best {slower}")
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
    if waiting > busy and x.parallelism.pipeline > best.parallelism.pipeline:
        return replace(x, why_not=f"{slower}: its stages wait for each other{close}")
    return replace(x, why_not=f"{slower}: {slower_for(waiting, busy)}{close}")
