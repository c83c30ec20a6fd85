"""Plan micro-batches from the lengths of documents, a cluster and a model.

Nothing is computed or sent. The same arguments give the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from seqpar.balance.methods import baselines, greedy, zeppelin
from seqpar.balance.planning.divide import as_few, even, in_order
from seqpar.balance.planning.local_search import refine
from seqpar.balance.planning.micro_batch import MicroBatch
from seqpar.balance.planning.plans import Plan
from seqpar.balance.predict.batch import MIN_SHARE_TOKENS, DocumentBatch, Offloading, Pieces
from seqpar.balance.predict.prediction import Prediction, predict
from seqpar.balance.predict.shared_heads import SharedHeads, spread
from seqpar.core.arguments import (
    MAX_DOCUMENT_TOKENS,
    CuSeqlens,
    Ints,
    as_bool,
    as_float,
    as_int,
    as_lengths,
    as_ranks,
)
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.model import Model
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.handle import LayoutCut

# Methods that place pieces. Zigzag is not one of them, since it cuts every document.
PLACES: dict[str, Callable[[DocumentBatch], Pieces]] = {
    "zeppelin": zeppelin.place,
    "bytescale": greedy.bytescale,
    "contiguous": baselines.contiguous,
    "wlb": greedy.wlb,
    "karmarkar_karp": greedy.karmarkar_karp,
    "power_of_two": greedy.power_of_two,
}
METHODS = (*PLACES, "zigzag")
"""The names of the methods, without "auto"."""

# "auto" tries to cut documents with more than these shares of a rank's mean work. With 0 every rank
# gets a part of each long document.
CUT_THRESHOLDS = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.0)
# A plan is large from this many documents × ranks, or above these numbers of ranks and of
# micro-batches. For a large plan "auto" tries only ByteScale's assignment, with fewer thresholds.
LARGE_PRODUCT = 2**17
LARGE_RANKS = 128
LARGE_BATCHES = 8
CUT_THRESHOLDS_WHEN_LARGE = (0.5, 0.125, 1.0)
GOOD_RATIO = 1.01  # slowest rank / mean, at which a large plan tries no further threshold
MAX_REFINED = 2  # placements that local search improves, best first
DONE_RATIO = 1.005  # slowest rank / mean, at which no further placement is refined
MAX_KARMARKAR_KARP_PRODUCT = 2**15  # documents × ranks
MAX_BATCHES = 2**20

Placed = tuple[str, Ints, LayoutCut, Prediction]  # method, order of documents, cut, prediction


def plan(
    lengths: CuSeqlens,
    cluster: Cluster,
    model: Model,
    *,
    capacity: int,
    method: str = "auto",
    offload: float = 0.0,
    checkpointing: str = "none",
    remap: bool = False,
    micro_batches: int | None = None,
    heads: int = 1,
) -> Plan:
    """Plan a step: which documents are computed together, and which rank holds which part of each.

    The strategy is yours; `seqpar.recommend` compares strategies by simulating whole steps, with
    this plan as one of the layouts.

    Args:
        lengths: (documents,) tokens of each document. Empty documents are dropped, and counted in
            the plan.
        cluster: the devices and their links.
        model: the model; the kinds of its layers determine the cost of attention.
        capacity: tokens that a rank may hold in a micro-batch (`Costs.token_capacity`).
        method: "zeppelin", "bytescale", "contiguous", "zigzag", "wlb", "karmarkar_karp" or
            "power_of_two"; "auto" takes the method with the least predicted seconds, and refines
            its result.
        offload: the largest share of its activations that a rank may copy to host memory, from 0 to
            1. Ranks then hold more tokens than their capacity, as far as compute hides the copies
            (ByteScale), and each micro-batch has the ratio to pass to `seqpar.offload`. Must be 0
            with contiguous packing and with `remap`.
        checkpointing: how activations are kept, as in `Costs.activation_bytes`. Activations that
            are recomputed are not copied.
        remap: whether linear modules run on a layout with equal numbers of tokens per rank
            (`token_balanced`); `Layout.remap` moves tokens there and back in each layer. The plan
            then balances only attention, and its seconds include the moves (Zeppelin). Must be
            False with `heads` > 1.
        micro_batches: number of micro-batches, which then take about equally long, as the stages of
            a pipeline need (ByteScale's balance for pipelines). None: the fewest that hold the
            documents. Must be None with contiguous packing, which keeps the order of documents.
        heads: number of ranks of a node that share attention's heads. With more than 1 the plan is
            for `USPAttention` on a mesh of (ranks / heads, heads). Each row of the mesh is planned
            as one rank, and the ranks of a row hold equal parts of its tokens.

    Raise a ValueError that names the argument which is wrong, for example if a document exceeds the
    capacity of all ranks together.
    """
    lengths = as_lengths("lengths", lengths)
    costs = Costs(cluster, model)
    as_ranks("cluster.ranks", cluster.ranks)
    heads = as_int("heads", heads, 1, MAX_DOCUMENT_TOKENS)
    if heads > 1:
        costs = SharedHeads(cluster, model, heads)
    capacity = as_int("capacity", capacity, 1, MAX_DOCUMENT_TOKENS)
    if method not in (*METHODS, "auto"):
        raise ValueError(f"method must be auto or one of {', '.join(METHODS)}; got {method!r}")
    offload = as_float("offload", offload)
    if not 0 <= offload <= 1:
        raise ValueError(f"offload must be from 0 to 1, got {offload}")
    if offload and method == "contiguous":
        raise ValueError("offload must be 0 with contiguous packing, which counts tokens alone")
    if as_bool("remap", remap) and offload:
        raise ValueError("offload must be 0 with remap, where most activations are on even ranks")
    if remap and heads > 1:
        raise ValueError("remap must be False with heads, which leave ranks of a row even")
    if micro_batches is not None:
        micro_batches = as_int("micro_batches", micro_batches, 1, MAX_BATCHES)
        if method == "contiguous":
            raise ValueError("micro_batches must be None with contiguous packing: it keeps order")
    kept, offloading = np.flatnonzero(lengths), None
    whole = DocumentBatch.of(lengths[kept], costs, capacity * heads, None, remap)
    if offload:
        # A rank may hold one token more than others of its group, so the group leaves them unused.
        room = capacity * heads - (heads - 1)
        offloading = Offloading.of(costs, room, offload, checkpointing)
        offloaded = replace(whole, capacity=room, offloading=offloading)
        if not _takes_more(whole, offloaded):
            whole, offloading = offloaded, replace(offloading, capacity=capacity)
    _check_fits(whole, kept, cluster.ranks)
    if method == "contiguous":
        parts = in_order(whole.lengths, whole.room)
    else:
        parts = as_few(whole) if micro_batches is None else even(whole, micro_batches)
    many = whole.lengths.size * whole.ranks >= LARGE_PRODUCT
    many = many or whole.ranks > LARGE_RANKS or sum(x.size > 0 for x in parts) > LARGE_BATCHES
    batches, methods, empty = [], [], MicroBatch.empty(cluster.ranks)
    for documents in parts:
        if not documents.size:
            batches.append(empty)
            continue
        name, order, cut, found = _best(whole.part(documents), method, many)
        index = kept[documents[order]]
        if isinstance(costs, SharedHeads):
            cut, found = spread(costs, lengths[index], cut, found, offloading)
        batches.append(MicroBatch(index, lengths[index], cut, *found))
        methods.append(name)
    named = method if method != "auto" else " and ".join(dict.fromkeys(["auto", *methods]))
    dropped = lengths.size - kept.size
    if heads > 1:
        whole = DocumentBatch.of(lengths[kept], Costs(cluster, model), capacity)
    bound = whole.lower_bound()
    return Plan(tuple(batches), named, cluster.ranks, capacity, bound, dropped, remap, heads)


def _takes_more(batch: DocumentBatch, offloaded: DocumentBatch) -> bool:
    """With offloading, `room` counts fewer tokens, so documents may fit better without it."""
    if batch.lengths.max(initial=0) > batch.room:
        return False
    refused = not offloaded.room or bool((offloaded.held > offloaded.room).any())
    return refused or -(-offloaded.held.sum() // offloaded.room) > -(
        -batch.held.sum() // batch.room
    )


def _check_fits(batch: DocumentBatch, indices: Ints, ranks: int) -> None:
    """`indices` are the documents' indices in the caller's lengths."""
    too_long = (batch.held > batch.room) | (batch.lengths > MAX_DOCUMENT_TOKENS)
    if not too_long.any():
        return
    i = int(np.argmax(too_long))
    stays = "" if batch.offloading is None else f", {batch.held[i]:.0f} of which stay on devices"
    most = min(batch.room, MAX_DOCUMENT_TOKENS)
    raise ValueError(
        f"lengths: document {indices[i]} has {batch.lengths[i]} tokens{stays}, and all "
        f"{ranks} ranks have capacity for {most}"
    )


def _best(batch: DocumentBatch, method: str, many: bool) -> Placed:
    """ "auto" refines the best of several methods; with `many` documents and ranks, of fewer."""
    if method == "zigzag":
        return "zigzag", np.arange(batch.lengths.size), *baselines.zigzag(batch)
    if method != "auto":
        pieces = PLACES[method](batch)
        return _ordered(method, batch, pieces, predict(batch, pieces))
    parts = CUT_THRESHOLDS_WHEN_LARGE if many else CUT_THRESHOLDS
    ways: list[tuple[str, Callable[[DocumentBatch], Pieces]]]
    ways = [("bytescale", partial(greedy.bytescale, part=part)) for part in parts]
    if not many:
        left_out = {"bytescale", "contiguous"}  # contiguous cuts more finely than a kernel's tile
        if batch.lengths.size * batch.ranks > MAX_KARMARKAR_KARP_PRODUCT:
            left_out.add("karmarkar_karp")
        ways += [way for way in PLACES.items() if way[0] not in left_out]
    tried = []
    for name, place in ways:
        pieces = place(batch)
        tried.append((name, pieces, predict(batch, pieces)))
        if many and _slowest(tried[-1]) <= GOOD_RATIO * batch.ideal:
            break
    tried.sort(key=_slowest)
    best = tried[0]
    for name, pieces, found in tried[:MAX_REFINED]:
        best = min(best, (name, *refine(batch, pieces, found)), key=_slowest)
        if _slowest(best) <= DONE_RATIO * batch.ideal:
            break
    # Zigzag cuts documents that are not long more finely than a kernel's tile.
    if not many and batch.lengths.min() >= MIN_SHARE_TOKENS * batch.ranks:
        cut, found = baselines.zigzag(batch)
        if found.seconds.max() < _slowest(best):
            return "zigzag", np.arange(batch.lengths.size), cut, found
    name, pieces, found = best
    return _ordered(name, batch, pieces, found)


def _slowest(tried: tuple[str, Pieces, Prediction]) -> float:
    return float(tried[2].seconds.max())


def _ordered(method: str, batch: DocumentBatch, pieces: Pieces, found: Prediction) -> Placed:
    """Order documents, and thereby rows, as Zeppelin's queues do: inter-node, intra-node, local."""
    order = np.arange(batch.lengths.size)
    if method != "contiguous":
        order = np.argsort(-_zones(batch, pieces), kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    documents = number[pieces.documents]
    cut = Spans.of(batch.ranks, pieces.ranks, documents, pieces.starts, pieces.stops)
    return method, order, cut, found


def _zones(batch: DocumentBatch, pieces: Pieces) -> Ints:
    """Return (documents,): 2 if a document is on several nodes, 1 on several ranks, otherwise 0."""
    zones = np.zeros(batch.lengths.size, np.int64)
    cut = pieces.take(~pieces.whole(batch))
    node = cut.ranks // batch.costs.cluster.devices_per_node
    zones[cut.documents] = 1
    first = np.full(batch.lengths.size, batch.ranks)
    np.minimum.at(first, cut.documents, node)
    zones[cut.documents[node > first[cut.documents]]] = 2
    return zones
