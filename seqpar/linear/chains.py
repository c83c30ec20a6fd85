"""Chain a document's spans, so that states can be passed on from each to the next.

A document's chain goes through the ranks that hold its spans, in the document's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up
from seqpar.linear.routes import StateRoutes


class Hop(NamedTuple):
    """Links of documents' chains that go from one rank to another, or to the same, as arrays.

    A link is a state that one span (or run) sends to the next: λ^rows · (the sum that has arrived
    at `carries_from`) + (the state of `own_states`). It may also go to or from a document's end.
    The links of a hop have one depth, which ascends along each chain, and their states go in one
    message, for any number of documents: one by one, 5,000 short documents on 64 ranks took 40,000
    messages per rank. Links that carry a sum come first. All ranks take the hops that concern them
    in one order, by depth first (with blocks, `scanning.py`), so no two ranks wait for each other.
    """

    depth: int
    source: int  # rank
    target: int  # rank
    own_states: Ints  # (links,) slot of the source's state that is added, or −1
    carries_from: Ints  # (links,) slot of the source's station whose sum is passed on, or −1
    rows: Ints  # (links,) over which that sum decays
    target_slots: Ints  # (links,) a station of the target; higher slots are sums between runs


def hops_of(routes: StateRoutes, rank: int, backward: bool, ends: bool = True) -> list[Hop]:
    """Return the hops to and from a rank, by depth, source, target; they are kept with the routes.

    Both ends have a hop's links in the same order. Without `ends` there are just those between
    spans: none goes to a document's end, or comes from there.
    """

    def build() -> list[Hop]:
        if routes.causal:
            links = _causal_links(routes, rank, backward, ends)
        else:
            links = _round_trip_links(routes, rank, backward)
        table = np.concatenate(links, axis=1)
        depth, source, target, document, _, carries_from = table[:6]
        table = table[:, np.lexsort((document, carries_from < 0, target, source, depth))]
        apart = np.flatnonzero((np.diff(table[:3]) != 0).any(0)) + 1
        parts = np.split(table, apart, axis=1) if table.size else []
        return [Hop(*part[:3, 0].tolist(), *part[4:]) for part in parts]

    return routes.derived(("hops", rank, backward, ends), build)


class ChainedSpans(NamedTuple):
    """All ranks' spans, or without causality runs, in the order of the documents, as arrays.

    A document's last span has its last token; runs are else in the order of the ranks.
    """

    holder: Ints  # the rank that holds it
    document: Ints
    rows: Ints  # how many it has
    state_in: Ints  # slot, or −1
    state_out: Ints  # slot, or −1
    number: Ints  # how many of the document come before
    behind: Ints  # how many of the document follow

    @classmethod
    def of(cls, routes: StateRoutes) -> ChainedSpans:
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
        unordered = holder, document, stop - start, state_in, state_out
        behind = np.repeat(count, count) - 1 - number
        return cls._make([*(column[order] for column in unordered), number, behind])

    def of_rank(self, rank: int) -> tuple[Ints, Ints]:
        """Return the spans that pass a state on, to or from a rank, and the last ones on the rank.

        They are indices; the one after a span that passes a state on is the one that it goes to.
        """
        here, last = self.holder == rank, self.behind == 0
        to_here = np.r_[here[1:], False]
        return np.flatnonzero((here | to_here) & ~last), np.flatnonzero(here & last)


class _Links(NamedTuple):
    """Links as columns, which broadcast; `hops_of` reads them in this order."""

    depth: Ints | int
    source: Ints | int
    target: Ints | int
    document: Ints
    own_state: Ints | int
    carries_from: Ints | int
    rows: Ints | int
    target_slot: Ints

    def table(self) -> Ints:
        """Return (8, links)."""
        return np.stack(np.broadcast_arrays(*self))


def _causal_links(routes: StateRoutes, rank: int, backward: bool, ends: bool) -> list[Ints]:
    """Return a rank's links of documents, from the first span to the last, or back."""
    spans = ChainedSpans.of(routes)
    current, mine = spans.of_rank(rank)
    following = current + 1
    if backward:
        carries = ends | (spans.behind[following] > 0)
        between = _Links(
            depth=spans.behind[following] + 1,
            document=spans.document[following],
            source=spans.holder[following],
            target=spans.holder[current],
            own_state=spans.state_in[following],
            carries_from=np.where(carries, spans.state_out[following], -1),
            rows=spans.rows[following],
            target_slot=spans.state_out[current],
        ).table()
        if not ends:
            return [between]
        return [between, *_links_from_ends(routes, spans, rank, 0, spans.state_out)]
    carries_from = np.where(spans.number > 0, spans.state_in, -1)
    between = _Links(
        depth=spans.number[current],
        document=spans.document[current],
        source=spans.holder[current],
        target=spans.holder[following],
        own_state=spans.state_out[current],
        carries_from=carries_from[current],
        rows=spans.rows[current],
        target_slot=spans.state_in[following],
    ).table()
    if not ends:
        return [between]
    ended = mine[: mine.size * routes.returns_final_state]
    to_ends = _Links(
        depth=spans.number[ended],
        document=spans.document[ended],
        source=rank,
        target=rank,
        own_state=spans.state_out[ended],
        carries_from=carries_from[ended],
        rows=spans.rows[ended],
        target_slot=routes.held(rank).states.states_in + np.arange(ended.size),
    ).table()
    return [between, to_ends]


def _round_trip_links(routes: StateRoutes, rank: int, backward: bool) -> list[Ints]:
    """Return a rank's links without causality.

    Sums are passed from run to run of a document, and the sum of all is passed back from the last.
    Nothing decays.
    """
    runs = ChainedSpans.of(routes)
    current, mine = runs.of_rank(rank)
    following = current + 1
    state = runs.state_in  # the slot both of a run's state and of its station
    stations = [routes.stations(rank, backward).slots.size for rank in range(routes.ranks)]
    passed_on = state + np.array(stations)[runs.holder]  # slots after the stations
    from_end = (runs.number > 0) | (backward and routes.returns_final_state)
    there = _Links(
        depth=runs.number[current],
        document=runs.document[current],
        source=runs.holder[current],
        target=runs.holder[following],
        own_state=state[current],
        carries_from=np.where(runs.number > 0, passed_on, -1)[current],
        rows=0,
        target_slot=passed_on[following],
    ).table()
    at_last = _Links(
        depth=runs.number[mine],
        document=runs.document[mine],
        source=rank,
        target=rank,
        own_state=state[mine],
        carries_from=np.where(from_end, passed_on, -1)[mine],
        rows=0,
        target_slot=state[mine],
    ).table()
    back = _Links(
        depth=(runs.number + 2 * runs.behind + 2)[following],
        document=runs.document[following],
        source=runs.holder[following],
        target=runs.holder[current],
        own_state=-1,
        carries_from=state[following],
        rows=0,
        target_slot=state[current],
    ).table()
    if backward:
        from_ends = _links_from_ends(routes, runs, rank, -1, passed_on)
        return [there, at_last, back, *from_ends]
    ended = mine[: mine.size * routes.returns_final_state]
    to_ends = _Links(
        depth=runs.number[ended] + 1,
        document=runs.document[ended],
        source=rank,
        target=rank,
        own_state=-1,
        carries_from=state[ended],
        rows=0,
        target_slot=routes.held(rank).states.states_in + np.arange(ended.size),
    ).table()
    return [there, at_last, back, to_ends]


def _links_from_ends(
    routes: StateRoutes, spans: ChainedSpans, rank: int, depth: int, slots: Ints
) -> Iterator[Ints]:
    """Yield a rank's links of backward from documents' ends, which all ranks have.

    They go to the last spans; `slots` are where, for all spans.
    """
    last = np.flatnonzero(spans.behind == 0)
    for source in range(routes.ranks) if routes.returns_final_state else ():
        reached = last if source == rank else last[spans.holder[last] == rank]
        yield _Links(
            depth=depth,
            document=spans.document[reached],
            source=source,
            target=spans.holder[reached],
            own_state=routes.held(source).states.states_in + spans.document[reached],
            carries_from=-1,
            rows=0,
            target_slot=slots[reached],
        ).table()
