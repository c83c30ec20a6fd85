"""What an all-gather of maps does under a layout: which maps go where, and how they are folded.

Maps of a document compose in its order alone, so a rank gets the map of each span of others that
comes before its own last one, and folds them one after another. Spans of one rank that are next to
each other are one span already. Of heads (`chain.py`) it gets a state alone.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.ranges import ranges
from seqpar.linear.indices import Index, index_of
from seqpar.linear.routes import StateRoutes
from seqpar.recurrent.chain import Chain


class Fold(NamedTuple):
    """One step of a fold: the spans with one number in all documents of which the rank needs them.

    `running` are the states of documents, those of the longest chains first.

    Attributes:
        stations: slots that get some of the running states: those that enter spans of this number.
        reached: which they get.
        maps: (documents,) the spans' maps among all full ones, for as many first documents.
    """

    stations: Tensor | None
    reached: Index
    maps: Index | None
    documents: int


class Gathering:
    """One rank's part in the exchange of one pass, with its tables on a device.

    Its own maps come first in what it folds: those of heads, of which just states are sent, and the
    full ones, apart from each other.

    Attributes:
        own: the slots of its own maps that somebody needs: of heads, and full ones.
        sends: (peer, own heads, own full ones) that each peer gets.
        recvs: (peer, heads, full ones) where those that arrive lie.
        counts: how many heads and full ones there are, own and arriving.
        first: where the running states begin, among heads.
        folds: the steps, in order.
        travels: whether anything is sent or received.
    """

    def __init__(
        self, routes: StateRoutes, rank: int, backward: bool, device: torch.device
    ) -> None:
        chain = Chain.of(routes, backward)
        mine = chain.holder == rank
        used = np.flatnonzero(mine & (chain.behind > 0))
        parts = [used[chain.number[used] == 0], used[chain.number[used] > 0]]
        self.own = [_of(chain.maps[part], device) for part in parts]
        place = np.full(chain.number.size, -1)  # of each span that the rank needs, in its tensor
        for part in parts:
            place[part] = np.arange(part.size)

        self.sends = []
        for peer, spans in sent_spans(chain, rank):
            of_heads = chain.number[spans] == 0
            some, full = (index_of(place[spans[x]], device) for x in (of_heads, ~of_heads))
            self.sends.append((peer, some, full))

        reach = _reach(chain)
        ours = np.flatnonzero((chain.holder[reach] == rank) & (chain.number[reach] > 0))
        last = reach[ours]  # of each document of which the rank needs anything
        heads = last - chain.number[last]
        needed = ranges(heads, last)
        self.recvs, counts = [], [part.size for part in parts]
        holders = chain.holder[needed]
        for peer in np.unique(holders[holders != rank]).tolist():
            spans, slices = needed[holders == peer], []
            of_heads = chain.number[spans] == 0
            for i, part in enumerate((spans[of_heads], spans[~of_heads])):
                slices.append(slice(counts[i], counts[i] + part.size))
                place[part] = np.arange(counts[i], counts[i] + part.size)
                counts[i] += part.size
            self.recvs.append((peer, slices[0], slices[1]))
        self.counts = counts
        self.travels = bool(self.sends or self.recvs)

        order = np.argsort(-chain.number[last], kind="stable")
        heads, lasts = heads[order], chain.number[last][order]
        self.first = index_of(place[heads], device)
        self.folds = []
        rows = np.repeat(np.arange(heads.size), lasts + 1)
        spans = ranges(heads, heads + lasts + 1)
        numbers = chain.number[spans]
        by_number = np.lexsort((rows, numbers))
        rows, spans, numbers = rows[by_number], spans[by_number], numbers[by_number]
        edges = np.searchsorted(numbers, np.arange(1, lasts.max(initial=0) + 2))
        for start, stop in itertools.pairwise(edges.tolist()):
            row, span = rows[start:stop], spans[start:stop]
            station = mine[span]
            applied = span[chain.number[span] < lasts[row]]
            self.folds.append(
                Fold(
                    stations=_of(chain.stations[span[station]], device) if station.any() else None,
                    reached=index_of(row[station], device),
                    maps=index_of(place[applied], device) if applied.size else None,
                    documents=applied.size,
                )
            )


def sent_spans(chain: Chain, rank: int) -> list[tuple[int, Ints]]:
    """Return the peers that a rank sends maps to, ascending, with the spans whose maps those are.

    The spans are indices in the chain, ascending.
    """
    used = np.flatnonzero((chain.holder == rank) & (chain.behind > 0))
    last = _reach(chain)
    heads, of_last = chain.heads[used], chain.heads[last]
    by_head = np.argsort(of_last, kind="stable")
    last, of_last = last[by_head], of_last[by_head]
    start, stop = (np.searchsorted(of_last, heads, side) for side in ("left", "right"))
    spans, reached = np.repeat(used, stop - start), last[ranges(start, stop)]
    later = (reached > spans) & (chain.holder[reached] != rank)
    spans, holders = spans[later], chain.holder[reached[later]]
    order = np.argsort(holders, kind="stable")
    spans, holders = spans[order], holders[order]
    edges = np.flatnonzero(np.diff(holders, prepend=-1, append=-1))
    pairs = itertools.pairwise(edges.tolist())
    return [(int(holders[start]), spans[start:stop]) for start, stop in pairs]


def _reach(chain: Chain) -> Ints:
    """Return the last span that each rank has of each document."""
    heads = chain.heads
    order = np.lexsort((chain.number, heads, chain.holder))
    holder, head = chain.holder[order], heads[order]
    changes = (holder[1:] != holder[:-1]) | (head[1:] != head[:-1])
    last = np.r_[changes, True][: order.size]
    return order[last]


def _of(numbers: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
