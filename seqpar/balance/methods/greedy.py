"""Greedy assignment: give documents to the ranks with the lowest load so far."""

from __future__ import annotations

import heapq

import numpy as np

from seqpar.balance.predict.batch import MIN_SHARE_TOKENS, DocumentBatch, Pieces
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats

MIN_RANKS_FOR_ROUNDS = 32  # with fewer, placing one document at a time is faster


class GreedyAssigner:
    """The load of each rank while a method places documents.

    It is the larger of `seconds` (ranks,) over the mean and of `held` (ranks,), tokens taken, over
    the capacity. Where memory is tight, tokens are therefore balanced as well.
    """

    def __init__(self, batch: DocumentBatch) -> None:
        self.batch = batch
        self.seconds, self.held = np.zeros(batch.ranks), np.zeros(batch.ranks)
        self.parts: list[Pieces] = []

    @property
    def load(self) -> Floats:
        """(ranks,) load of each rank: 1 at the mean of seconds, or at its capacity."""
        return np.maximum(
            self.seconds / max(self.batch.mean, 1e-30), self.held / self.batch.capacity
        )

    def put(self, documents: Ints, sizes: Ints, members: Ints) -> None:
        """Place documents on rings. `members` lists the ranks of one ring after another."""
        pieces = Pieces.rings(self.batch, documents, sizes, members)
        seconds = (self.batch.weights[documents] / sizes)[_owners(sizes)]
        self.seconds += np.bincount(members, seconds, self.batch.ranks)
        self._add(pieces)

    def deal(self, documents: Ints, sizes: Ints | None = None) -> None:
        """Give each document, in order, to the lightest ranks: to `sizes` of them, by default one.

        Documents without room there go to the ranks with the fewest tokens, or are cut to fit.
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
        """Place whole documents as `_rounds` does, faster for few ranks; return the rest."""
        batch, mean = self.batch, self.batch.mean
        seconds, held = self.seconds.tolist(), self.held.tolist()
        load = self.held / batch.capacity if by_tokens else self.load
        lightest = list(zip(load.tolist(), range(batch.ranks), strict=True))
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
            heapq.heapreplace(
                lightest, (full if by_tokens else max(seconds[rank] / mean, full), rank)
            )
        placed = found >= 0
        self.put(documents[placed], np.ones_like(documents[placed]), found[placed])
        return np.flatnonzero(~placed)

    def _rounds(self, documents: Ints, sizes: Ints, by_tokens: bool) -> Ints:
        """Place documents in rounds; return the indices of documents that found no room.

        Each round sorts the ranks by load and fills them in that order, at least a sixteenth of
        them, until the next rank is not the lightest any more.
        """
        batch, place, ends = self.batch, 0, np.cumsum(sizes)
        weights = batch.weights[documents] / sizes
        # A rank of a ring has two chunks, and each may have one token more than another chunk.
        taken = -(-batch.lengths[documents] // sizes) + 2 * (sizes > 1)
        held, before = taken * batch.kept[documents], self.held.copy()
        heavier = 0 * weights if by_tokens else weights / max(batch.mean, 1e-30)
        late, chosen = np.zeros(sizes.size, bool), []
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
            # The rounds counted too many tokens per share of a cut document. `_add` counts again.
            self.held = before
            members, placed = np.concatenate(chosen), ~late
            self._add(Pieces.rings(batch, documents[placed], sizes[placed], members))
        return np.flatnonzero(late)

    def _squeeze(self, document: int) -> None:
        """Place a document whole on a rank with room, or cut it over the fewest ranks with room."""
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
        # The last rank gets at least a tile, if it has room and the rank before has enough tokens.
        enough = min(MIN_SHARE_TOKENS, int(room[members[-1]]))
        if stops[-2] > length - enough and room[members[-2]] >= 2 * MIN_SHARE_TOKENS:
            stops[-2] = length - enough
        starts = np.r_[0, stops[:-1]]
        pieces = Pieces(np.full(count, document), members, starts, stops)
        share = (stops.astype(np.float64) ** 2 - starts.astype(np.float64) ** 2) / length**2
        self.seconds[members] += batch.weights[document] * share
        self._add(pieces)

    def _add(self, pieces: Pieces) -> None:
        held = (pieces.stops - pieces.starts) * self.batch.kept[pieces.documents]
        self.held += np.bincount(pieces.ranks, held, self.batch.ranks)
        self.parts.append(pieces)

    @property
    def pieces(self) -> Pieces:
        return Pieces.joined(self.parts)


def _owners(sizes: Ints) -> Ints:
    index = np.arange(sizes.size)
    return index if (sizes == 1).all() else np.repeat(index, sizes)
