"""Chain a document's spans, so that each span can pass a state on to the next.

The *chain* of a document is its spans in the document's order, with the ranks that hold them. A
*link* of a chain is a state that one span (or run) sends to the next. A *hop* is the links that one
rank sends to another rank, or to itself, in one message.

States are kept in tensors by *slot*, the index along the first dimension. `routes.py` defines the
*stations*, which need sums of states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up
from seqpar.linear.routes import StateRoutes


class Hop(NamedTuple):
    """Links of documents' chains that one rank sends to another rank, or to itself, as arrays.

    The state of a link is λ^rows · (the sum that has arrived at `carries_from`) + (the state of
    `own_states`). A link may also begin or end at a document's end instead of a span.

    The *depth* of a link ascends along each chain. The links of a hop have one depth, and their
    states are sent in one message, for any number of documents: sent one by one, 5,000 short
    documents on 64 ranks took 40,000 messages per rank. Links that pass on a sum come first. All
    ranks process their hops in one order, by depth first (with blocks, `scanning.py`), so no two
    ranks wait for each other.
    """

    depth: int
    source: int  # the rank that sends
    target: int  # the rank that receives
    own_states: Ints  # (links,) slot of the source's state that is added, or −1
    carries_from: Ints  # (links,) slot of the source's station whose sum is passed on, or −1
    rows: Ints  # (links,) number of rows over which that sum decays
    target_slots: Ints  # (links,) a station of the target; higher slots are sums between runs


def hops_of(routes: StateRoutes, rank: int, backward: bool, ends: bool = True) -> list[Hop]:
    """Return the hops to and from a rank, by depth, source, target, cached with the routes.

    The two ranks of a hop have its links in the same order. With `ends` False, links that begin or
    end at a document's end are left out.
    """

    def build() -> list[Hop]:
        if routes.causal:
            links = _causal_links(routes, rank, backward, ends)
        else:
            links = _round_trip_links(routes, rank, backward)
        table = np.concatenate([*links], axis=1)
        depth, source, target, document, _, carries_from = table[:6]
        table = table[:, np.lexsort((document, carries_from < 0, target, source, depth))]
        apart = np.flatnonzero((np.diff(table[:3]) != 0).any(0)) + 1
        parts = np.split(table, apart, axis=1) if table.size else []
        return [Hop(*part[:3, 0].tolist(), *part[4:]) for part in parts]

    return routes.derived(("hops", rank, backward, ends), build)


class Chain(NamedTuple):
    """The spans of all ranks in the order of a pass, document by document, as (spans,) arrays.

    Without causality, the elements are runs. In forward the last span of a document has the
    document's last token, and runs are otherwise in the order of the ranks. In backward the order
    is reversed.
    """

    holder: Ints  # the rank that holds the span
    number: Ints  # how many spans of the document come before it in this pass
    behind: Ints  # how many spans of the document come after it in this pass
    maps: Ints  # the slot of its map, or state, on its holder, or −1
    stations: Ints  # the slot of the state that enters it in this pass, or −1
    documents: Ints
    rows: Ints

    @classmethod
    def of(cls, routes: StateRoutes, backward: bool) -> Chain:
        held = [routes.held(rank) for rank in range(routes.ranks)]
        holder = np.repeat(np.arange(len(held)), [x.documents.size for x in held])
        columns = [
            [x.documents, x.starts, x.stops, x.ends, x.states.state_in, x.states.state_out]
            for x in held
        ]
        document, start, stop, ends, state_in, state_out = np.concatenate(columns, axis=1)
        order = np.lexsort((holder, ends, start, document))
        count = np.unique(document, return_counts=True)[1]
        number = count_up(count)
        behind = np.repeat(count, count) - 1 - number
        unordered = state_out, state_in, document, stop - start, holder
        state_out, state_in, document, rows, holder = (x[order] for x in unordered)
        if not backward:
            return cls(holder, number, behind, state_out, state_in, document, rows)
        reverse = holder, behind, number, state_in, state_out, document, rows
        return cls._make(x[::-1] for x in reverse)

    @property
    def heads(self) -> Ints:
        """(spans,) for each span, the index of the first span of its document."""
        return np.arange(self.number.size) - self.number

    def of_rank(self, rank: int) -> tuple[Ints, Ints]:
        """Return the spans whose links begin or end on a rank, and the documents' last spans there.

        Both are indices in the chain. A span passes its state on to the span with the next index.
        """
        here, last = self.holder == rank, self.behind == 0
        to_here = np.r_[here[1:], False]
        return np.flatnonzero((here | to_here) & ~last), np.flatnonzero(here & last)

    def links(
        self,
        source: Ints,
        target: Ints,
        slots: Ints,
        depth: Ints,
        states: Ints | int,
        carries: Ints,
        rows: Ints | int,
    ) -> Ints:
        """Return (8, links): depth, source, target, document, then the last four fields of `Hop`.

        `source` and `target` are the spans of each link, as indices in the chain. `slots` is the
        slot of each link on its target. The other arguments have a value per span, which is read at
        the source of the link.
        """
        columns = np.broadcast_arrays(depth, self.holder, self.documents, states, carries, rows)
        depth, holder, document, *others = np.stack(columns)[:, source]
        return np.stack([depth, holder, self.holder[target], document, *others, slots])


def _causal_links(routes: StateRoutes, rank: int, backward: bool, ends: bool) -> Iterator[Ints]:
    """Yield a rank's links of documents, from the first span of a pass to the last."""
    chain = Chain.of(routes, backward)
    current, last = chain.of_rank(rank)
    carries = np.where((chain.number > 0) | (backward and ends), chain.stations, -1)
    columns = chain.number + backward, chain.maps, carries, chain.rows
    yield chain.links(current, current + 1, chain.stations[current + 1], *columns)
    if ends and backward:
        first = np.flatnonzero(chain.number == 0)
        yield from _links_from_ends(routes, chain, rank, first, 0, chain.stations)
    elif ends:
        yield _links_to_ends(routes, chain, rank, last, *columns)


def _round_trip_links(routes: StateRoutes, rank: int, backward: bool) -> Iterator[Ints]:
    """Yield a rank's links without causality.

    Sums are passed from run to run of a document. The last run then passes the sum of all runs back
    to the others. Nothing decays.
    """
    runs = Chain.of(routes, backward=False)
    current, last = runs.of_rank(rank)
    following = current + 1
    state = runs.stations  # a run's state and its station have the same slot
    stations = [routes.stations(rank, backward).slots.size for rank in range(routes.ranks)]
    passed_on = state + np.array(stations)[runs.holder]  # sums between runs follow the stations
    carries = np.where(runs.number > 0, passed_on, -1)
    yield runs.links(current, following, passed_on[following], runs.number, state, carries, 0)
    from_end = (runs.number > 0) | (backward and routes.returns_final_state)
    carries = np.where(from_end, passed_on, -1)
    yield runs.links(last, last, state[last], runs.number, state, carries, 0)
    back = runs.number + 2 * runs.behind + 2
    yield runs.links(following, current, state[current], back, -1, state, 0)
    if backward:
        ends = np.flatnonzero(runs.behind == 0)
        yield from _links_from_ends(routes, runs, rank, ends, -1, passed_on)
    else:
        yield _links_to_ends(routes, runs, rank, last, runs.number + 1, -1, state, 0)


def _links_to_ends(routes: StateRoutes, chain: Chain, rank: int, last: Ints, *columns: Any) -> Ints:
    """Return links of forward from the last spans on a rank to the ends of their documents."""
    ended = last[: last.size * routes.returns_final_state]
    slots = routes.held(rank).states.states_in + np.arange(ended.size)
    return chain.links(ended, ended, slots, *columns)


def _links_from_ends(
    routes: StateRoutes, chain: Chain, rank: int, last: Ints, depth: int, slots: Ints
) -> Iterator[Ints]:
    """Yield a rank's links of backward from documents' ends, which are on all ranks.

    They lead to the `last` spans of documents. `slots` (spans,) is the slot of each span on its
    rank.
    """
    for source in range(routes.ranks) if routes.returns_final_state else ():
        reached = last if source == rank else last[chain.holder[last] == rank]
        documents = chain.documents[reached]
        states = routes.held(source).states.states_in + documents
        columns = depth, source, chain.holder[reached], documents, states, -1, 0, slots[reached]
        yield np.stack(np.broadcast_arrays(*columns))
