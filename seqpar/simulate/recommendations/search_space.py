"""The ways to train a model: layouts, transports of linear layers, numbers of servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from seqpar.balance.methods.greedy import partition
from seqpar.balance.planning.planner import plan
from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.layout.layout import Layout
from seqpar.simulate.steps.steps import step
from seqpar.strategies.recurrent import TRANSPORTS

LAYOUTS = ("zigzag", "contiguous")
WHOLE = "whole"  # the name of layouts that cut no document
_MAX_TASKS_PER_CALL = 16
_TASKS_PER_SERVER = 4


class NamedLayout(NamedTuple):
    """A layout, its name, and the order of its documents."""

    name: str
    layout: Layout
    documents: tuple[int, ...]


def layouts(
    lengths: Ints, costs: Costs, documents: Sequence[int] | None = None
) -> Iterator[NamedLayout]:
    """Yield layouts over all ranks: zigzag, contiguous, and a plan's if it differs from both.

    They have all documents, or these, in order.
    """
    order = tuple(range(lengths.size) if documents is None else documents)
    edges = np.r_[0, np.cumsum(lengths[[*order]])]
    seen = set()
    for name in LAYOUTS:
        layout: Layout = getattr(Layout, name)(edges, costs.cluster.ranks)
        seen.add(layout.geometry.digest)
        yield NamedLayout(name, layout, order)
    named = planned(lengths, costs, order)
    if named is not None and named.layout.geometry.digest not in seen:
        yield named


def planned(lengths: Ints, costs: Costs, documents: Sequence[int]) -> NamedLayout | None:
    """Return the layout of `balance.plan` for these documents; None if there is none."""
    cluster, lengths = costs.cluster, lengths[[*documents]]
    if cluster.ranks == 1:
        return None
    try:
        capacity = int(lengths.sum())
        found = plan(lengths, cluster, costs.model, capacity=capacity, micro_batches=1)
    except ValueError:  # planning does not support, for example, this number of ranks
        return None
    (batch,) = found.micro_batches
    in_order = tuple(documents[i] for i in batch.documents.tolist())
    return NamedLayout(found.method, batch.layout, in_order)


def transport_of(layout: Layout, costs: Costs) -> str | None:
    """Return the fastest transport of linear layers on a layout; None if none is needed.

    It does not depend on the strategy of softmax layers. Transports that exceed the device's memory
    come after all that fit.
    """
    linear = tuple(x for x in costs.model.layers if x.kind == "linear")[:1]
    if not linear or layout.ranks == 1:
        return None
    model, capacity = replace(costs.model, layers=linear), costs.cluster.device.memory
    ranked = []
    for transport in TRANSPORTS:
        try:
            one = step("ring", layout, costs.cluster, model, transport=transport)
        except ValueError:  # recurrences refuse the layout; simulating the way reports it
            continue
        ranked.append((one.memory.max() > capacity, one.seconds, transport))
    return min(ranked, key=lambda x: x[:2])[2] if ranked else TRANSPORTS[0]


def numbers_of_servers(lengths: Ints, costs: Costs) -> list[int]:
    """Return the numbers of servers to try: softmax attention's share of the ranks, and half of it.

    With two alternating nano-batches, trainers and servers are always busy if devices are divided
    in proportion to softmax attention and all other work. Every trainer has a document.
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
    return NamedLayout(WHOLE, Layout.from_spans(spans, edges), tuple(range(lengths.size)))


def tasks_of(layout: Layout, servers: int) -> int:
    """Return the number of tasks per call on servers, about four for each server.

    The tasks are even if the trainer with the most attention has its share of them.
    """
    lengths = np.diff(layout.cu_seqlens).astype(np.float64)
    work = [sum(lengths[x.document] ** 2 for x in layout.spans(r)) for r in range(layout.ranks)]
    most = max(work) / sum(work)
    return int(np.clip(np.ceil(_TASKS_PER_SERVER * servers * most), 1, _MAX_TASKS_PER_CALL))
