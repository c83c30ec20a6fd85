"""Greedy methods, which place each document on the ranks with the least load so far."""

from __future__ import annotations

import heapq

import numpy as np

from seqpar.balance.predict.batch import MIN_SHARE_TOKENS, DocumentBatch, Pieces
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats

MIN_RANKS_FOR_ROUNDS = 32  # with fewer ranks, placing one document at a time is faster


class GreedyAssigner:
    """The load of each rank while a method places documents.

    The load of a rank is the larger of two ratios: its seconds divided by the mean (`seconds`,
    (ranks,)), and its tokens divided by its capacity (`held`, (ranks,)). Because of the second
    ratio, tokens are balanced too if there is little free memory.
    """

    def __init__(self, batch: DocumentBatch) -> None:
        self.batch = batch
        self.seconds, self.held = np.zeros(batch.ranks), np.zeros(batch.ranks)
        self.parts: list[Pieces] = []

    @property
    def load(self) -> Floats:
        """The load (ranks,) of each rank. The load is 1 if the seconds of the rank are the mean, or
        if its memory is full.
        """
        of_time = self.seconds / max(self.batch.mean, 1e-30)
        return np.maximum(of_time, self.held / self.batch.capacity)

    def put(self, documents: Ints, sizes: Ints, members: Ints) -> None:
        """Place each document on a ring of ranks. `members` lists the ranks of the first document's
        ring, then the ranks of the second document's ring, and so on.
        """
        pieces = Pieces.rings(self.batch, documents, sizes, members)
        seconds = (self.batch.weights[documents] / sizes)[_owners(sizes)]
        self.seconds += np.bincount(members, seconds, self.batch.ranks)
        self._add(pieces)

    def deal(self, documents: Ints, sizes: Ints | None = None) -> None:
        """Place the given documents one after another. Each document is placed on the ranks that
        have the least load so far.

        `sizes` is the number of ranks for each document, by default 1. If the ranks with the least
        load cannot hold a document, the document is placed on the ranks with the fewest tokens. If
        the ranks with the fewest tokens cannot hold the document, it is cut into parts that fit.
        """
        sizes = np.ones_like(documents) if sizes is None else sizes
        for by_tokens in (False, True):
            cut = 1 + int(np.max(np.flatnonzero(sizes > 1), initial=-1))
            if self.batch.ranks >= MIN_RANKS_FOR_ROUNDS:
                cut = sizes.size
            late = self._rounds(documents[:cut], sizes[:cut], by_tokens)
            late = np.concatenate([late, cut + self._one_by_one(documents[cut:], by_tokens)])
            documents, sizes = documents[late], sizes[late]
        for document in documents.tolist():
            self._squeeze(document)

    def _one_by_one(self, documents: Ints, by_tokens: bool) -> Ints:
        """Place whole documents one after another. Returns the indices of documents for which there
        is no room.
        """
        batch, mean = self.batch, self.batch.mean
        seconds, held = self.seconds.tolist(), self.held.tolist()
        loads = self.held / batch.capacity if by_tokens else self.load
        lightest = list(zip(loads.tolist(), range(batch.ranks), strict=True))
        heapq.heapify(lightest)
        found = np.empty_like(documents)
        taken, weights = batch.held[documents].tolist(), batch.weights[documents].tolist()
        for i, (tokens, weight) in enumerate(zip(taken, weights, strict=True)):
            rank = lightest[0][1]
            if held[rank] + tokens > batch.capacity:
                found[i] = -1
                continue
            found[i] = rank
            held[rank] += tokens
            seconds[rank] += weight
            full = held[rank] / batch.capacity
            load = full if by_tokens else max(seconds[rank] / mean, full)
            heapq.heapreplace(lightest, (load, rank))
        placed = found >= 0
        self.put(documents[placed], np.ones_like(documents[placed]), found[placed])
        return np.flatnonzero(~placed)

    def _rounds(self, documents: Ints, sizes: Ints, by_tokens: bool) -> Ints:
        """Place documents, several in one numpy operation. Returns the indices of documents for
        which there is no room.
        """
        batch, place, ends = self.batch, 0, np.cumsum(sizes)
        weights = batch.weights[documents] / sizes
        held, before = batch.ring_held(documents, sizes), self.held.copy()
        heavier = 0 * weights if by_tokens else weights / max(batch.mean, 1e-30)
        late, chosen = np.zeros(sizes.size, bool), []
        # Each round sorts the ranks by load and adds documents in that order. A round ends when the
        # next rank no longer has the least load, but not before it has used a sixteenth of the
        # ranks.
        while place < documents.size:
            load = self.held / batch.capacity if by_tokens else self.load
            order = np.argsort(load, kind="stable")
            done = int(ends[place] - sizes[place])
            stop = int(np.searchsorted(ends, done + batch.ranks, side="right"))
            owner = place + _owners(sizes[place:stop])
            members = order[: owner.size]
            after = (self.held[members] + held[owner]) / batch.capacity
            loaded = np.maximum(load[members] + heavier[owner], after)
            lightest = np.minimum.accumulate(np.concatenate([[np.inf], loaded]))[:-1]
            later = np.flatnonzero(load[members] > lightest)
            first = max(int(later[0]) if later.size else members.size, batch.ranks // 16)
            count = max(1, int(np.searchsorted(ends[place:stop] - done, first, side="right")))
            size = int(ends[place + count - 1]) - done
            late[owner[:size][after[:size] > 1]] = True
            fit = ~late[owner[:size]]
            owner, members = owner[:size][fit], members[:size][fit]
            self.seconds[members] += weights[owner]
            self.held[members] += held[owner]
            chosen.append(members)
            place += count
        if chosen:
            # The rounds have counted upper bounds for shares of cut documents. `_add` counts
            # exactly.
            self.held = before
            members, placed = np.concatenate(chosen), ~late
            self._add(Pieces.rings(batch, documents[placed], sizes[placed], members))
        return np.flatnonzero(late)

    def _squeeze(self, document: int) -> None:
        """Place a document on one rank with room, or cut it over the fewest ranks with room."""
        batch, length = self.batch, int(self.batch.lengths[document])
        room = ((batch.capacity - self.held) / batch.kept[document]).astype(np.int64)
        whole = np.flatnonzero(room >= length)
        if whole.size:
            rank = whole[np.argmin(self.load[whole])]
            self.put(np.array([document]), np.array([1]), np.array([rank]))
            return
        order = np.argsort(-room, kind="stable")
        count = int(np.searchsorted(np.cumsum(room[order]), length)) + 1
        members, stops = order[:count], np.minimum(np.cumsum(room[order[:count]]), length)
        # The last rank gets at least a tile, if it has room for a tile and the rank before it keeps
        # one.
        enough = min(MIN_SHARE_TOKENS, int(room[members[-1]]))
        if stops[-2] > length - enough and room[members[-2]] >= 2 * MIN_SHARE_TOKENS:
            stops[-2] = length - enough
        starts = np.r_[0, stops[:-1]]
        pieces = Pieces(np.full(count, document), members, starts, stops)
        share = (stops.astype(np.float64) ** 2 - starts.astype(np.float64) ** 2) / length**2
        self.seconds[members] += batch.weights[document] * share
        self._add(pieces)

    def _add(self, pieces: Pieces) -> None:
        self.held += pieces.held_by_rank(self.batch)
        self.parts.append(pieces)

    @property
    def pieces(self) -> Pieces:
        return Pieces.joined(self.parts)


def _owners(sizes: Ints) -> Ints:
    index = np.arange(sizes.size)
    return index if (sizes == 1).all() else np.repeat(index, sizes)


def wlb(batch: DocumentBatch) -> Pieces:
    """Place documents, the longest first. Each document is placed on the rank that has the least
    work among the ranks that can still hold the document.

    Wang et al., "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training"
    (2025), section 4. Only documents longer than a rank's capacity are cut. Unlike in the paper, no
    documents are deferred to later steps.
    """
    ranks, order = GreedyAssigner(batch), batch.longest_first
    ranks.deal(order, batch.least_ranks[order])
    return ranks.pieces


def bytescale(batch: DocumentBatch, part: float = 1.0) -> Pieces:
    """Cut documents by their work, and place the parts on the ranks with the least load.

    Ge et al., "ByteScale: Efficient Scaling of LLM Training with a 2048K Context Length on More
    Than 12,000 GPUs" (2025), sections 4 and 5. A document can be on any number of ranks. A part of
    a document takes at most `part` times the mean seconds of a rank, but has at least
    `MIN_SHARE_TOKENS` tokens. Small parts make it possible to balance both tokens and work.
    """
    ranks, order = GreedyAssigner(batch), batch.longest_first
    ranks.deal(order, batch.shares_of(batch.mean * part)[order])
    return ranks.pieces


def power_of_two(batch: DocumentBatch) -> Pieces:
    """Place documents, the longest first. Each document is placed on the block of ranks with the
    least load.

    A block has a power of two of consecutive ranks, and begins at a multiple of its size. Megatron
    Core's dynamic context parallelism (`default_dynamic_cp`) uses the same blocks, because
    communicators for these blocks can be created once.
    """
    # The size of a document's block depends on the document's fraction of all work and on its
    # number of tokens. If no block has room for a document, it is cut into parts that fit.
    ranks, order = GreedyAssigner(batch), batch.longest_first
    wanted = 2 ** np.ceil(np.log2(batch.shares_of(batch.mean))).astype(np.int64)
    sizes = np.minimum(wanted, 2 ** int(np.log2(batch.ranks)))
    large = order[sizes[order] > 1]
    late = []
    for document, held in zip(large, batch.ring_held(large, sizes[large]), strict=True):
        size = int(sizes[document])
        blocks = np.arange(batch.ranks // size * size).reshape(-1, size)
        open_blocks = blocks[batch.capacity - ranks.held[blocks].max(1) >= held]
        if not len(open_blocks):
            late.append(document)
            continue
        members = open_blocks[np.argmin(ranks.load[open_blocks].max(1))]
        ranks.put(np.array([document]), np.array([size]), members)
    ranks.deal(np.array(late, np.int64))
    ranks.deal(order[sizes[order] == 1])
    return ranks.pieces


def karmarkar_karp(batch: DocumentBatch) -> Pieces:
    """Partition the documents into sets of nearly equal work, one set per rank.

    Trainers for reinforcement learning balance documents in this way.
    """
    # Documents longer than a rank's capacity are first cut over as few ranks as possible. Then the
    # sets with the most work are placed on the ranks with the least load. A document that does not
    # fit on its set's rank is placed on a different rank.
    ranks, order = GreedyAssigner(batch), batch.longest_first
    cut = batch.least_ranks[order] > 1
    ranks.deal(order[cut], batch.least_ranks[order[cut]])
    late = []
    sets = partition(batch.weights[order[~cut]], batch.ranks)
    for rank, chosen in zip(np.argsort(ranks.seconds, kind="stable"), sets, strict=True):
        documents = order[~cut][chosen]
        fits = np.cumsum(batch.held[documents]) <= batch.capacity - ranks.held[rank]
        late.append(documents[~fits])
        held = documents[fits]
        ranks.put(held, np.ones_like(held), np.full_like(held, rank))
    ranks.deal(batch.by_length(np.concatenate(late)))
    return ranks.pieces


def partition(weights: Floats, ranks: int) -> list[Ints]:
    """Partition items into `ranks` sets of nearly equal weight. Returns the heaviest set first.

    Karmarkar, Karp, "The Differencing Method of Set Partitioning" (1982). The method takes P·log P
    steps per item for P ranks, so it is slow for many ranks.
    """
    empty: list[list[int]] = [[] for _ in range(ranks)]
    heap: list[tuple[float, int, Floats, list[list[int]]]] = []
    for i, weight in enumerate(weights.tolist()):
        sums = np.r_[weight, np.zeros(ranks - 1)]
        heap.append((-weight, i, sums, [[i], *empty[1:]]))
    if not heap:
        return [np.zeros(0, np.int64)] * ranks
    heapq.heapify(heap)
    number = len(heap)
    # A partial solution is a list of P sets. Each step merges the two partial solutions in which
    # the heaviest and the lightest set differ most, by joining the heaviest sets of one solution
    # with the lightest sets of the other.
    while len(heap) > 1:
        _, _, one, of_one = heapq.heappop(heap)
        _, _, two, of_two = heapq.heappop(heap)
        sums = one + two[::-1]
        order = np.argsort(-sums, kind="stable")
        sets = [a + b for a, b in zip(of_one, reversed(of_two), strict=True)]
        sums, sets = sums[order], [sets[i] for i in order]
        heapq.heappush(heap, (float(sums[-1] - sums[0]), number, sums, sets))
        number += 1
    return [np.array(chosen, np.int64) for chosen in heap[0][3]]
