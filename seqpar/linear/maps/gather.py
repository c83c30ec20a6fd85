"""The transport "all_gather": one exchange sends the map of each span to every rank that needs it.

A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is the
function from the state before the span to the state after the span (`maps.py`). The receiver
*folds* maps: it applies the maps of earlier spans to a state, one map after another. This is
algorithm 2 of Sun et al., "LASP-2" (2025), with maps in place of states. For the first span of a
document (the *head*, `ends.py`), a rank receives a state instead of a map.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import Ints
from seqpar.core.device_tables import TableHolder
from seqpar.core.ranges import ranges
from seqpar.core.traffic import Traffic
from seqpar.linear.chains import Chain
from seqpar.linear.linear_strategy import Exchange
from seqpar.linear.maps.map_strategy import MapCall, MapStrategy
from seqpar.linear.maps.maps import Maps, apply, pack, unpack
from seqpar.linear.routes import StateRoutes
from seqpar.linear.scanning import Index, as_table, index_of


class Fold(NamedTuple):
    """One step in which a rank applies one further map to the state of each document.

    The map of a span of tokens is the function from the state before the span to the state after
    the span. The *running state* of a document is the state to which earlier steps have applied
    maps. A step changes the running states of only those documents that have a further span.
    Documents with the most spans come first.
    """

    stations: Tensor | None  # the slots of the states that enter the spans of this step
    reached: Index  # which running states are written to these slots
    # (documents,): the index of each span's map among all maps. The fold changes the first
    # `documents` running states.
    maps: Index | None
    documents: int


class Gathering(TableHolder):
    """The messages of one rank in one pass, and the steps in which the rank applies maps to states.

    A *span* is a range of consecutive tokens of a document on one rank. The map of a span is the
    function from the state before the span to the state after the span. One tensor has the states
    after the first span of each document, and a second tensor has the maps of all other spans. In
    both tensors, the spans of this rank come first, and the spans of other ranks follow.
    """

    def __init__(self, routes: StateRoutes, rank: int, backward: bool) -> None:
        chain = Chain.of(routes, backward)
        mine = chain.holder == rank
        used = np.flatnonzero(mine & (chain.behind > 0))
        parts = [used[chain.number[used] == 0], used[chain.number[used] > 0]]
        # The slots of the rank's own heads and own maps that other spans need.
        self.own = [as_table(chain.maps[part]) for part in parts]
        # For each span, the index of its entry in the tensor of heads or of maps.
        place = np.full(chain.number.size, -1)
        for part in parts:
            place[part] = np.arange(part.size)

        self.sends = []  # (rank, own heads, own maps) that are sent to each rank
        for peer, spans in sent_spans(chain, rank):
            of_heads = chain.number[spans] == 0
            some, full = (index_of(place[spans[x]]) for x in (of_heads, ~of_heads))
            self.sends.append((peer, some, full))

        reach = _reach(chain)
        ours = np.flatnonzero((chain.holder[reach] == rank) & (chain.number[reach] > 0))
        last = reach[ours]  # the last span of each document that the rank needs
        heads = last - chain.number[last]
        needed = ranges(heads, last)
        self.recvs = []  # (rank, heads, maps): the slices to which entries arrive
        # the numbers of own and arriving entries
        self.counts = counts = [part.size for part in parts]
        holders = chain.holder[needed]
        for peer in np.unique(holders[holders != rank]).tolist():
            spans, places = needed[holders == peer], []
            of_heads = chain.number[spans] == 0
            for i, part in enumerate((spans[of_heads], spans[~of_heads])):
                places.append(slice(counts[i], counts[i] + part.size))
                place[part] = np.arange(counts[i], counts[i] + part.size)
                counts[i] += part.size
            self.recvs.append((peer, *places))
        self.travels = bool(self.sends or self.recvs)

        order = np.argsort(-chain.number[last], kind="stable")
        heads, lasts = heads[order], chain.number[last][order]
        self.first = index_of(place[heads])  # the states of heads, with which folds begin
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
            entered = as_table(chain.stations[span[station]]) if station.any() else None
            maps = index_of(place[applied]) if applied.size else None
            self.folds.append(Fold(entered, index_of(row[station]), maps, applied.size))


def sent_spans(chain: Chain, rank: int) -> list[tuple[int, Ints]]:
    """Return the spans whose maps or states `rank` sends, as pairs (receiving rank, indices in the
    chain).
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
    heads = chain.heads
    order = np.lexsort((chain.number, heads, chain.holder))
    holder, head = chain.holder[order], heads[order]
    changes = (holder[1:] != holder[:-1]) | (head[1:] != head[:-1])
    last = np.r_[changes, True][: order.size]
    return order[last]


@dataclass(frozen=True)
class AllGather(MapStrategy):
    routable = True
    transport = "all_gather"

    def exchange(
        self, comm: Comm, call: MapCall, device: torch.device, backward: bool
    ) -> Exchange[Maps]:
        return GatheredMaps(comm, call, device, backward)

    def exchange_traffic(self, call: MapCall, rank: int) -> list[Traffic]:
        rows = []
        for direction in ("forward", "backward"):
            chain = Chain.of(call.routes, direction == "backward")
            for peer, spans in sent_spans(chain, rank):
                heads = int(np.count_nonzero(chain.number[spans] == 0))
                of_heads, full = heads * call.state_bytes, (spans.size - heads) * call.map_bytes
                rows.append(Traffic(direction, 0, peer, 1, of_heads))
                rows.append(Traffic(direction, 0, peer, 1, full))
        return rows


class GatheredMaps:
    """The exchange that sends maps to all ranks that need them. `wait` returns the states that
    enter the spans of this rank.
    """

    def __init__(self, comm: Comm, call: MapCall, device: torch.device, backward: bool) -> None:
        rank, routes = comm.rank, call.routes
        self._comm, self._call = comm, call
        self._label = f"recurrent {'backward' if backward else 'forward'}"
        self._plan = call.once_on(
            device, ("map gathering", backward), lambda: Gathering(routes, rank, backward)
        )
        spans = routes.held(rank).states
        self._stations = spans.states_out if backward else spans.states_in
        self.travels = self._plan.travels

    def post(self, maps: Maps) -> None:
        plan, state = self._plan, maps.state
        of_heads, of_full = plan.own
        self._heads = state.new_empty((plan.counts[0], *state.shape[1:]))
        self._heads[: len(of_heads)] = state.index_select(0, of_heads)
        self._packed = state.new_empty((plan.counts[1], *self._call.packed_shape))
        full = Maps(maps.transition.index_select(0, of_full), state.index_select(0, of_full))
        pack(full, self._packed[: len(of_full)])
        heads, packed = self._heads, self._packed
        sends = [(peer, heads[part]) for peer, part, _ in plan.sends]
        sends += [(peer, packed[part]) for peer, _, part in plan.sends]
        recvs = [(peer, heads[part]) for peer, part, _ in plan.recvs]
        recvs += [(peer, packed[part]) for peer, _, part in plan.recvs]
        self._pending = self._comm.exchange(sends, recvs, label=self._label)

    def wait(self) -> Tensor:
        self._pending.wait()
        call, plan = self._call, self._plan
        maps = unpack(call.options.kind, self._packed, call.shape.dim)
        states = self._heads.new_empty((self._stations, *self._heads.shape[1:]))
        running = self._heads[plan.first]
        for fold in plan.folds:
            if fold.stations is not None:
                states.index_copy_(0, fold.stations, running[fold.reached])
            if fold.maps is not None:
                before, one = running[: fold.documents], fold.maps
                running = apply(call.options.kind, maps.transition[one], before) + maps.state[one]
        return states
