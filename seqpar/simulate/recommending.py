"""Recommend: simulate what could train a model on a cluster, and rank it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from seqpar.arguments import CuSeqlens, Ints, as_lengths, shown
from seqpar.balance.planner import plan
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.memory import CHECKPOINTING
from seqpar.costs.model import Model
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import candidates
from seqpar.simulate.certainty import error_of
from seqpar.simulate.outcome import AS_FAST, limit_of, slower_by, slower_for
from seqpar.simulate.recommendation import Recommendation, Recommendations, as_gb
from seqpar.simulate.steps import Step, step

_LAYOUTS = ("zigzag", "contiguous")


def recommend(model: Model, cluster: Cluster, lengths: CuSeqlens) -> Recommendations:
    """Return ways to train a model on documents, the fastest first, each with why it is not better.

    Each strategy that the model's heads allow is simulated (`seqpar.simulate.step`) with each
    layout: zigzag, contiguous, and that of `balance.plan`. All documents are in one packed batch
    over all ranks, over which parameters are sharded too; Adam updates them. Where a step does not
    fit into a device's memory, activations are copied to the host or recomputed, whichever takes
    less time and fits. What fits with neither comes last, and says by how much it does not.

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
    device, costs = "cuda" if cluster.overlaps else "cpu", Costs(cluster, model)
    found, error = [], error_of(cluster)
    for name, layout, documents in _layouts(lengths, costs):
        for strategy, mesh in candidates(cluster, cluster.ranks):
            options = {} if mesh is None else {"mesh": mesh}
            way = Recommendation(strategy, options, layout, name, device, documents, error=error)
            found.append(_simulated(way, costs))
    found.sort(key=lambda x: x.seconds)  # what is as fast stays in order
    best = found[0]
    return Recommendations([best, *(_compared(x, best) for x in found[1:])])


def _layouts(lengths: Ints, costs: Costs) -> Iterator[tuple[str, Layout, tuple[int, ...]]]:
    """Yield layouts with their names, and the order of their documents."""
    cluster = costs.cluster
    edges, order = np.r_[0, np.cumsum(lengths)], tuple(range(lengths.size))
    seen = set()
    for name in _LAYOUTS:
        layout: Layout = getattr(Layout, name)(edges, cluster.ranks)
        seen.add(layout.geometry.digest)
        yield name, layout, order
    if cluster.ranks == 1:
        return
    try:
        capacity = int(lengths.sum())
        planned = plan(lengths, cluster, costs.model, capacity=capacity, micro_batches=1)
    except ValueError:  # which plans are not for, as for some numbers of ranks
        return
    (batch,) = planned.micro_batches
    if batch.layout.geometry.digest not in seen:
        yield planned.method, batch.layout, tuple(batch.documents.tolist())


def _simulated(way: Recommendation, costs: Costs) -> Recommendation:
    """Return a way with what it takes, and the fastest manner of keeping activations that fits."""
    fitting, least = [], np.inf
    for checkpointing in CHECKPOINTING:
        try:
            found = _stepped(way, costs, checkpointing)
        except ValueError as refusal:
            return replace(way, checkpointing="", why_not=str(refusal))
        least = min(least, found.memory)
        if found.memory <= costs.cluster.device.memory:
            fitting.append(found)
            break  # what recomputes more takes longer
        way = replace(way, memory=found.memory, bytes=found.bytes, longest=found.longest)
        if (offloaded := _offloaded(found, costs)) is not None:
            fitting.append(offloaded)
            if offloaded.seconds == found.seconds:
                break  # the copies are hidden
    if fitting:
        return min(fitting, key=lambda x: x.seconds)
    capacity = costs.cluster.device.memory
    needs = f"needs {as_gb(least)} GB of {as_gb(capacity)}"
    short = f"{needs}: {as_gb(least - capacity)} GB too much"
    return replace(way, checkpointing=CHECKPOINTING[-1], limit="memory", why_not=short)


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

    All but two layers' may. They are copied beside forward, and back beside backward.
    """
    cluster, layers = costs.cluster, len(costs.model.layers)
    if not cluster.overlaps or way.checkpointing != "none":  # the rest is little, or in use
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
