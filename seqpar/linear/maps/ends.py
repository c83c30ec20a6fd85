"""Find the first and last spans of documents. The first span sends a state instead of a map.

A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is the
function from the state before the span to the state after the span. In forward, the *head* of a
document is its first span, and the *tail* is its last span. In backward, the head is the last span,
and the tail is the first span. The rank of the head knows the state that enters the head, so it can
compute the state that leaves the head. It sends this state instead of a map. With the delta rule, a
state has K·V numbers, and a map has K·(K + V) numbers.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from seqpar.core.device_tables import TableHolder
from seqpar.linear.chains import Chain
from seqpar.linear.kinds import Kind
from seqpar.linear.maps.maps import Maps, apply
from seqpar.linear.routes import StateRoutes
from seqpar.linear.scanning import as_table


class Ends(TableHolder):
    """The heads and tails of documents on one rank, in one pass. The head of a document is the
    first span that the pass reaches, and the tail is the last span.
    """

    def __init__(self, routes: StateRoutes, rank: int, backward: bool) -> None:
        chain = Chain.of(routes, backward)
        mine = np.flatnonzero(chain.holder == rank)
        heads = mine[(chain.number[mine] == 0) & (chain.stations[mine] >= 0)]
        tails = mine[(chain.behind[mine] == 0) & (chain.maps[mine] >= 0)]
        heads, tails = (x[np.argsort(chain.documents[x], kind="stable")] for x in (heads, tails))
        entered = np.flatnonzero(chain.maps[heads] >= 0)
        carried = np.flatnonzero(chain.number[tails] > 0)

        self.documents = as_table(chain.documents[tails])  # the documents of tails that have a map
        # The documents of heads that a state enters.
        self.of_heads = as_table(chain.documents[heads])
        empty = np.flatnonzero(routes.lengths == 0)
        self.without_tokens = as_table(empty) if empty.size else None
        self._head_stations = as_table(chain.stations[heads])
        self._entered, self._head_maps = as_table(entered), as_table(chain.maps[heads[entered]])
        self._carried, self._tail_maps = as_table(carried), as_table(chain.maps[tails])
        self._tail_stations = as_table(chain.stations[tails[carried]])

    def enter(self, kind: Kind, maps: Maps, entering: Tensor) -> Maps:
        """Return the maps of spans, with the state of each head's map replaced by the state that
        leaves the head.

        `entering` (heads, B, H, K, V) has the states that enter the heads.
        """
        if not self._entered.numel():
            return maps
        transition = maps.transition.index_select(0, self._head_maps)
        left = apply(kind, transition, entering.index_select(0, self._entered))
        return maps._replace(state=maps.state.index_add(0, self._head_maps, left))

    def begin(self, sums: Tensor, entering: Tensor) -> None:
        sums.index_copy_(0, self._head_stations, entering)

    def leave(self, kind: Kind, maps: Maps, sums: Tensor) -> Tensor:
        """Return the states that leave the last spans of documents, ordered by document.

        `sums` has the states that enter the spans of this rank, ordered by the slots of their
        stations.
        """
        states = maps.state.index_select(0, self._tail_maps)
        if self._carried.numel():
            transition = maps.transition.index_select(0, self._tail_maps[self._carried])
            entered = sums.index_select(0, self._tail_stations)
            states.index_add_(0, self._carried, apply(kind, transition, entered))
        return states
