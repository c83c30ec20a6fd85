"""Ways in which a model could be trained: layouts, transports of linear layers, servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from seqpar.balance.methods.karmarkar_karp import partition
from seqpar.balance.planning.planner import plan
from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.layout.layout import Layout
from seqpar.simulate.steps.steps import step
from seqpar.strategies.recurrent import TRANSPORTS

LAYOUTS = ("zigzag", "contiguous")
WHOLE = "whole"  # the name of layouts whose documents are whole
_MAX_TASKS = 16  # per call on servers
_TASKS_PER_SERVER = 4


class NamedLayout(NamedTuple):
    """A layout, how it is made, and the order of its documents."""

    name: str
    layout: Layout
    documents: tuple[int, ...]


def layouts(lengths: Ints, costs: Costs) -> Iterator[NamedLayout]:
    """Yield layouts over all ranks: zigzag, contiguous, and that of a plan if it is another one."""
    cluster = costs.cluster
    edges, order = np.r_[0, np.cumsum(lengths)], tuple(range(lengths.size))
    seen = set()
    for name in LAYOUTS:
        layout: Layout = getattr(Layout, name)(edges, cluster.ranks)
        seen.add(layout.geometry.digest)
        yield NamedLayout(name, layout, order)
    if cluster.ranks == 1:
        return
    try:
        capacity = int(lengths.sum())
        planned = plan(lengths, cluster, costs.model, capacity=capacity, micro_batches=1)
    except ValueError:  # which plans are not for, as for some numbers of ranks
        return
    (batch,) = planned.micro_batches
    if batch.layout.geometry.digest not in seen:
        yield NamedLayout(planned.method, batch.layout, tuple(batch.documents.tolist()))


def transport_of(layout: Layout, costs: Costs) -> str | None:
    """Return the transport of linear layers that is fastest on a layout; None if none is needed.

    It does not depend on the strategy of softmax layers. What needs more memory than there is comes
    behind all that do not.
    """
    linear = tuple(x for x in costs.model.layers if x.kind == "linear")[:1]
    if not linear or layout.ranks == 1:
        return None
    model, capacity = replace(costs.model, layers=linear), costs.cluster.device.memory
    found = []
    for transport in TRANSPORTS:
        try:
            one = step("ring", layout, costs.cluster, model, transport=transport)
        except ValueError:  # the layout is not for recurrences, which the way itself says
            continue
        found.append((one.memory.max() > capacity, one.seconds, transport))
    return min(found, key=lambda x: x[:2])[2] if found else TRANSPORTS[0]


def numbers_of_servers(lengths: Ints, costs: Costs) -> list[int]:
    """Return how many of the ranks could be servers: by their share of the work, and half of it.

    With two nano-batches that take turns trainers and servers are busy all the time if the shares
    of devices are those of softmax attention and of all else. No trainer has no documents.
    """
    ranks, model = costs.cluster.ranks, costs.model
    softmax = tuple(x for x in model.layers if x.kind != "linear")
    if ranks == 1 or not softmax:
        return []
    of_softmax = Costs(costs.cluster, replace(model, layers=softmax))
    starts = np.zeros(lengths.size)
    attention, others = 0.0, 0.0
    for backward in (False, True):
        on_servers = float(of_softmax.span_work(starts, lengths, backward).sum())
        attention += on_servers
        others += float(costs.span_work(starts, lengths, backward).sum()) - on_servers
        others += float(costs.tokenwise(lengths, backward).sum())
    share = ranks * attention / (attention + others)
    least = max(1, ranks - int(np.count_nonzero(lengths)))
    wanted = {round(share / 2), round(share)}
    return sorted({min(max(least, x), ranks - 1) for x in wanted})


def on_trainers(lengths: Ints, trainers: int) -> NamedLayout:
    """Return the layout in which trainers have whole documents, of about as many tokens each."""
    sets = partition(lengths.astype(np.float64), trainers)
    spans = [[(i, 0, int(lengths[i])) for i in sorted(x.tolist()) if lengths[i]] for x in sets]
    edges = np.r_[0, np.cumsum(lengths)]
    return NamedLayout(WHOLE, Layout.from_spans(spans, edges), tuple(range(lengths.size)))


def tasks_of(layout: Layout, servers: int) -> int:
    """Return into how many tasks a call on servers is cut: about four a server.

    They are even if the trainer with most attention has its part of them.
    """
    lengths = np.diff(layout.cu_seqlens).astype(np.float64)
    work = [sum(lengths[x.document] ** 2 for x in layout.spans(r)) for r in range(layout.ranks)]
    most = max(work) / sum(work)
    return int(np.clip(np.ceil(_TASKS_PER_SERVER * servers * most), 1, _MAX_TASKS))
