"""Plan micro-batches from the lengths of documents, a cluster and a model.

Nothing is computed or sent. The same arguments give the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from seqpar.balance.methods import baselines, greedy, zeppelin
from seqpar.balance.planning.divide import as_few, even, in_order
from seqpar.balance.planning.local_search import refine
from seqpar.balance.planning.micro_batch import MicroBatch
from seqpar.balance.planning.plans import Plan
from seqpar.balance.predict.batch import DocumentBatch, Offloading, Pieces
from seqpar.balance.predict.prediction import Prediction, predict
from seqpar.balance.predict.shared_heads import SharedHeads, spread
from seqpar.core.arguments import (
    MAX_DOCUMENT_TOKENS,
    CuSeqlens,
    Ints,
    as_bool,
    as_choice,
    as_float,
    as_int,
    as_lengths,
    as_ranks,
)
from seqpar.core.compiling import outside_graphs
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.model import Model
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.handle import LayoutCut

# Methods that return pieces. Zigzag is not in this table, because it cuts every document and would
# return documents × ranks pieces.
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

# The thresholds that "auto" tries. A document is cut if its work is more than this fraction of the
# mean work of a rank. With 0, every rank holds a part of each long document.
CUT_THRESHOLDS = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.0)
# If documents × ranks reaches this limit, "auto" tries smaller capacities only for plans that take
# more than DONE_RATIO times the bound. For smaller plans, a trial takes little time.
MEDIUM_PRODUCT = 2**10
# A plan is *large* if documents × ranks reaches LARGE_PRODUCT, if there are more than LARGE_RANKS
# ranks, or if there are more than LARGE_BATCHES micro-batches. In a large plan, "auto" refines only
# ByteScale's assignment, with fewer thresholds.
LARGE_PRODUCT = 2**17
LARGE_RANKS = 128
LARGE_BATCHES = 8
CUT_THRESHOLDS_WHEN_LARGE = (0.5, 0.125, 1.0)
# If slowest rank / mean is at most this, no more methods are tried for a large plan.
GOOD_RATIO = 1.01
MAX_REFINED = 2  # the number of placements that local search improves
DONE_RATIO = 1.005  # if slowest rank / mean is at most this, no further placement is refined
# Documents × ranks above which "auto" does not try Karmarkar-Karp.
MAX_KARMARKAR_KARP_PRODUCT = 2**15
MAX_BATCHES = 2**20

Tried = tuple[str, Pieces, Prediction]  # a method, its pieces and their prediction


class Placed(NamedTuple):
    method: str
    order: Ints  # the documents, in the layout's order
    cut: LayoutCut
    found: Prediction
    most: float  # the most tokens that any method placed on a rank


@outside_graphs
def plan(
    lengths: CuSeqlens,
    cluster: Cluster | str,
    model: Model | str,
    *,
    capacity: int,
    method: str = "auto",
    offload: float = 0.0,
    checkpointing: str = "none",
    remap: bool = False,
    micro_batches: int | None = None,
    heads: int = 1,
) -> Plan:
    """Plan a step: which documents are computed together, and which tokens each rank holds.

    A plan does not choose a strategy. To compare strategies, use `seqpar.recommend`, which
    simulates whole steps.

    Args:
        lengths: (documents,) integers. The number of tokens of each document. Empty documents are
            left out, and counted in the plan's `dropped`.
        cluster: the devices and their links, or the name of a preset, such as "4x8-h100".
        model: the model, or the name of a preset, such as "llama-8b". The kinds of its layers
            determine the cost of attention.
        capacity: the largest number of tokens that a rank can hold in a micro-batch.
            `Costs.token_capacity` computes it.
        method: "zeppelin", "bytescale", "contiguous", "zigzag", "wlb", "karmarkar_karp" or
            "power_of_two"; "auto" uses the method with the least predicted seconds, and refines its
            result. "auto" also tries smaller capacities, so that a larger capacity never makes a
            step slower.
        offload: a number from 0 to 1. The largest fraction of a rank's activations that is copied
            to host memory. If it is above 0, ranks can hold more tokens than their capacity, as
            long as computation hides the copies (ByteScale). Pass `MicroBatch.offload` of the plan
            to `seqpar.offload`. Must be 0 with contiguous packing and with `remap`.
        checkpointing: how activations are kept, as in `Costs.activation_bytes`. Activations that
            are recomputed are not copied to host memory.
        remap: whether each layer moves tokens, by `Layout.remap`, to a layout with equal numbers of
            tokens per rank (`token_balanced`) for its linear modules, and back (Zeppelin). If True,
            the plan balances attention only, and its seconds include the moves. Must be False with
            `heads` > 1.
        micro_batches: the number of micro-batches. With a number, all micro-batches take about the
            same time, as a pipeline requires (ByteScale's balance for pipelines). With None, as few
            micro-batches as possible are used, or more if "auto" predicts a faster step with more.
            Must be None with contiguous packing, which keeps the order of documents.
        heads: the number of ranks of a node that divide the heads of attention. If above 1, the
            plan is for `USPAttention` on a mesh of (ranks / heads, heads). Each row of the mesh is
            planned like a single rank, and the row's tokens are divided equally among its ranks.

    Raises a ValueError that names a wrong argument, for example if a document exceeds the capacity
    of all ranks together.
    """
    lengths = as_lengths("lengths", lengths)
    costs = Costs(cluster, model)
    cluster, model = costs.cluster, costs.model
    as_ranks("cluster.ranks", cluster.ranks)
    heads = as_int("heads", heads, 1, MAX_DOCUMENT_TOKENS)
    if heads > 1:
        costs = SharedHeads(cluster, model, heads)
    capacity = as_int("capacity", capacity, 1, MAX_DOCUMENT_TOKENS)
    as_choice("method", method, ("auto", *METHODS))
    offload = as_float("offload", offload)
    if not 0 <= offload <= 1:
        raise ValueError(f"offload must be from 0 to 1, got {offload}")
    if offload and method == "contiguous":
        raise ValueError(
            "offload must be 0 with contiguous packing, which does not account for "
            f"offloading, got {offload}"
        )
    if as_bool("remap", remap) and offload:
        raise ValueError(
            "offload must be 0 with remap, since most activations then belong to layers with equal "
            f"numbers of tokens per rank, got {offload}"
        )
    if remap and heads > 1:
        raise ValueError(
            f"remap must be False with heads={heads}, since the ranks of a row then hold equal "
            "numbers of tokens"
        )
    if micro_batches is not None:
        micro_batches = as_int("micro_batches", micro_batches, 1, MAX_BATCHES)
        if method == "contiguous":
            raise ValueError(
                "micro_batches must be None with contiguous packing, which keeps the documents' "
                f"order, got {micro_batches}"
            )
    kept, offloading = np.flatnonzero(lengths), None
    whole = DocumentBatch.of(lengths[kept], costs, capacity * heads, None, remap)
    if offload:
        # A rank can hold one token more than another rank of its group, so up to heads − 1 tokens
        # of a group's capacity stay unused.
        room = capacity * heads - (heads - 1)
        offloading = Offloading.of(costs, room, offload, checkpointing)
        offloaded = replace(whole, capacity=room, offloading=offloading)
        if not _takes_more(whole, offloaded):
            whole, offloading = offloaded, replace(offloading, capacity=capacity)
    _check_fits(whole, kept, cluster.ranks)
    if method == "auto":
        fastest = _fastest(whole, micro_batches)
    elif method == "contiguous":
        fastest = _Fastest()
        fastest.consider(_Division(whole, in_order(whole.lengths, whole.room)), method)
    else:
        fastest = _Fastest()
        fastest.consider(_divided(whole, micro_batches), method)
    batches, methods = [], []
    for documents, placed in fastest.parts:
        if placed is None:
            batches.append(MicroBatch.empty(cluster.ranks))
            continue
        index, cut, found = kept[documents[placed.order]], placed.cut, placed.found
        if isinstance(costs, SharedHeads):
            cut, found = spread(costs, lengths[index], cut, found, offloading)
        batches.append(MicroBatch(index, lengths[index], cut, *found))
        methods.append(placed.method)
    named = method if method != "auto" else " and ".join(dict.fromkeys(["auto", *methods]))
    dropped = lengths.size - kept.size
    if heads > 1:
        whole = DocumentBatch.of(lengths[kept], Costs(cluster, model), capacity)
    bound = whole.lower_bound()
    return Plan(tuple(batches), named, cluster.ranks, capacity, bound, dropped, remap, heads)


class _Division:
    def __init__(self, whole: DocumentBatch, documents: list[Ints]) -> None:
        self.documents = documents
        self.batches = [whole.part(index) for index in documents]
        self.bounds = [batch.lower_bound() for batch in self.batches]
        large = whole.lengths.size * whole.ranks >= LARGE_PRODUCT or whole.ranks > LARGE_RANKS
        self.is_large = large or sum(index.size > 0 for index in documents) > LARGE_BATCHES

    def same_as(self, other: _Division) -> bool:
        alike = len(self.documents) == len(other.documents)
        return alike and all(map(np.array_equal, self.documents, other.documents))


class _Fastest:
    """The fastest plan found so far: the division of documents into micro-batches, and the
    placement of each micro-batch on ranks.
    """

    def __init__(self) -> None:
        # The documents of each micro-batch, and their placement; None if there are no documents.
        self.parts: list[tuple[Ints, Placed | None]] = []
        self.seconds = np.inf

    def consider(self, division: _Division, method: str) -> float:
        """Place the documents of each micro-batch. Keep the result if it is the fastest so far.

        Returns the largest number of tokens that any method placed on a rank, or infinity if not
        all micro-batches were placed.
        """
        # The seconds of all placed micro-batches, plus the lower bounds of those that are not
        # placed yet.
        seconds, most = sum(division.bounds), 0.0
        found = list[tuple[Ints, Placed | None]]()
        for documents, batch, bound in zip(
            division.documents, division.batches, division.bounds, strict=True
        ):
            if seconds >= self.seconds:
                return np.inf
            placed = _best(batch, method, division.is_large) if documents.size else None
            if placed is not None:
                seconds += float(placed.found.seconds.max()) - bound
                most = max(most, placed.most)
            found.append((documents, placed))
        if seconds < self.seconds:
            self.parts, self.seconds = found, seconds
        return most


def _fastest(whole: DocumentBatch, micro_batches: int | None) -> _Fastest:
    """Find the plan of the method "auto", which is the fastest plan of several methods.

    "auto" also tries a half of the capacity, a quarter, and so on, so that doubling the capacity
    never makes a plan slower.
    """
    fastest, before, most = _Fastest(), None, np.inf
    bound, documents = whole.lower_bound(), whole.lengths.size
    enough = (DONE_RATIO if documents * whole.ranks >= MEDIUM_PRODUCT else 0.0) * bound
    while True:
        try:
            division = _divided(whole, micro_batches)
        except ValueError:
            if before is None:
                raise
            return fastest  # the documents do not fit with half of the capacity
        # If no rank was full, and the documents are divided in the same way, the smaller capacity
        # would not change the result.
        if before is None or most > whole.capacity or not division.same_as(before):
            most = fastest.consider(division, "auto")
        for name in _others(whole) if division.is_large else ():
            if before is None and fastest.seconds <= GOOD_RATIO * bound:
                return fastest
            fastest.consider(division, name)
        if micro_batches is None and whole.offloading is None:
            ordered = _Division(whole, in_order(whole.lengths, whole.room))
            fewer = len(ordered.documents) < len(division.documents)
            fastest.consider(ordered, "auto" if fewer else "contiguous")
        before, whole = division, replace(whole, capacity=whole.capacity // 2)
        fits = 0 < whole.lengths.max(initial=0) <= whole.room
        if fastest.seconds <= enough or division.is_large or whole.offloading or not fits:
            return fastest


def _divided(whole: DocumentBatch, micro_batches: int | None) -> _Division:
    return _Division(whole, as_few(whole) if micro_batches is None else even(whole, micro_batches))


def _takes_more(batch: DocumentBatch, offloaded: DocumentBatch) -> bool:
    """Return whether these documents need more micro-batches with offloading than without
    offloading.
    """
    if batch.lengths.max(initial=0) > batch.room:
        return False
    refused = not offloaded.room or bool((offloaded.held > offloaded.room).any())
    return refused or -(-offloaded.held.sum() // offloaded.room) > -(
        -batch.held.sum() // batch.room
    )


def _check_fits(batch: DocumentBatch, indices: Ints, ranks: int) -> None:
    """Raise a ValueError if a document does not fit into the memory of all ranks together.

    `indices` are the indices of the documents in the lengths that the user gave.
    """
    too_long = (batch.held > batch.room) | (batch.lengths > MAX_DOCUMENT_TOKENS)
    if not too_long.any():
        return
    i = int(np.argmax(too_long))
    stays = "" if batch.offloading is None else f", {batch.held[i]:.0f} of which stay on devices"
    most = min(batch.room, MAX_DOCUMENT_TOKENS)
    raise ValueError(
        f"lengths: document {indices[i]} has {batch.lengths[i]} tokens{stays}, but must have at "
        f"most {most}, the capacity of all {ranks} ranks"
    )


def _best(batch: DocumentBatch, method: str, large: bool) -> Placed:
    """Place documents by a method. "auto" tries several methods and refines the best result.

    If `large` is True, "auto" refines only the best placement by ByteScale's method.
    """
    order = np.arange(batch.lengths.size)
    if method == "zigzag":
        return Placed("zigzag", order, *baselines.zigzag(batch), 0.0)
    if method != "auto":
        pieces = PLACES[method](batch)
        return _ordered(batch, (method, pieces, predict(batch, pieces)), 0.0)
    parts = CUT_THRESHOLDS_WHEN_LARGE if large else CUT_THRESHOLDS
    ways: list[tuple[str, Callable[[DocumentBatch], Pieces]]]
    ways = [("bytescale", partial(greedy.bytescale, part=part)) for part in parts]
    if not large:
        ways += [(name, PLACES[name]) for name in _others(batch) if name in PLACES]
    tried = list[Tried]()
    for name, place in ways:
        pieces = place(batch)
        tried.append((name, pieces, predict(batch, pieces)))
        if large and _slowest(tried[-1]) <= GOOD_RATIO * batch.ideal:
            break
    tried.sort(key=_slowest)
    best = tried[0]
    for name, pieces, found in tried[:MAX_REFINED]:
        tried.append((name, *refine(batch, pieces, found)))
        best = min(best, tried[-1], key=_slowest)
        if _slowest(best) <= DONE_RATIO * batch.ideal:
            break
    most = max(float(pieces.held_by_rank(batch).max()) for _, pieces, _ in tried)
    if not large:
        cut, found = baselines.zigzag(batch)
        if found.seconds.max() < _slowest(best):
            return Placed("zigzag", order, cut, found, most)
    return _ordered(batch, best, most)


def _others(batch: DocumentBatch) -> list[str]:
    left_out = {"bytescale"}
    if batch.lengths.size * batch.ranks > MAX_KARMARKAR_KARP_PRODUCT:
        left_out.add("karmarkar_karp")
    if batch.offloading is not None:
        left_out.add("contiguous")  # contiguous packing counts tokens as if nothing were offloaded
    return [name for name in METHODS if name not in left_out]


def _slowest(tried: Tried) -> float:
    return float(tried[2].seconds.max())


def _ordered(batch: DocumentBatch, tried: Tried, most: float) -> Placed:
    """Order the documents of a placement as in Zeppelin's queues. Documents on several nodes come
    first, then documents on several ranks of one node, then all other documents.
    """
    method, pieces, found = tried
    order = np.arange(batch.lengths.size)
    if method != "contiguous":
        order = np.argsort(-_zones(batch, pieces), kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    documents = number[pieces.documents]
    cut = Spans.of(batch.ranks, pieces.ranks, documents, pieces.starts, pieces.stops)
    return Placed(method, order, cut, found, most)


def _zones(batch: DocumentBatch, pieces: Pieces) -> Ints:
    """Return (documents,): 2 for a document on several nodes, 1 for a document on several ranks of
    one node, and 0 for a document on one rank.
    """
    zones = np.zeros(batch.lengths.size, np.int64)
    cut = pieces.take(~pieces.whole(batch))
    node = cut.ranks // batch.costs.cluster.devices_per_node
    zones[cut.documents] = 1
    first = np.full(batch.lengths.size, batch.ranks)
    np.minimum.at(first, cut.documents, node)
    zones[cut.documents[node > first[cut.documents]]] = 2
    return zones
