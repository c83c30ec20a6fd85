"""Chain a document's spans, so that states can be passed on from each to the next.

A document's chain goes through the ranks that hold its spans, in the document's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from seqpar.arguments import Ints
from seqpar.layout.ranges import count_up
from seqpar.linear.routes import StateRoutes


class Link(NamedTuple):
    """A link of a document's chain: a state that one span (or run) sends to the next.

    It is λ^rows · (the sum that has arrived at `carries_from`) + (the state of `own_state`). The
    next one may be on the same rank. A link may also go to or from a document's end. All ranks take
    the links that concern them in one order, by depth first (in `strategies/zeco.py`, depth + block
    number), so no two ranks wait for each other.
    """

    depth: int  # ascends along the chain
    document: int
    source: int  # rank
    target: int  # rank
    own_state: int  # slot of the source's state that is added, or −1
    carries_from: int  # slot of the source's station whose sum is passed on, or −1
    rows: int  # over which that sum decays
    target_slot: int  # of the target's stations, behind which come those of sums between runs


def links_of(routes: StateRoutes, rank: int, backward: bool) -> list[Link]:
    """Return the links to and from a rank; they are kept with the routes."""

    def build() -> list[Link]:
        build_links = _causal_links if routes.causal else _round_trip_links
        table = np.concatenate(build_links(routes, rank, backward))
        source, target = table[:, 2], table[:, 3]
        return [Link(*row) for row in table[(source == rank) | (target == rank)].tolist()]

    return routes.derived(("links", rank, backward), build)


class _ChainedSpans(NamedTuple):
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
    def of(cls, routes: StateRoutes) -> _ChainedSpans:
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


def _table(**columns: Any) -> Ints:
    """Return links as rows; a column is an array, or one number for all."""
    ordered = [columns[name] for name in Link._fields]
    return np.stack(np.broadcast_arrays(*ordered), axis=1)


def _causal_links(routes: StateRoutes, rank: int, backward: bool) -> list[Ints]:
    """Return links of all documents, from the first span to the last, or back.

    Those from documents' ends, which are on every rank, are the ones that concern a rank.
    """
    spans = _ChainedSpans.of(routes)
    current = np.flatnonzero(spans.behind)
    following = current + 1
    last = np.flatnonzero(spans.behind == 0)
    carries_from = np.where(spans.number > 0, spans.state_in, -1)
    if backward:
        between = _table(
            depth=spans.behind[following] + 1,
            document=spans.document[following],
            source=spans.holder[following],
            target=spans.holder[current],
            own_state=spans.state_in[following],
            carries_from=spans.state_out[following],
            rows=spans.rows[following],
            target_slot=spans.state_out[current],
        )
    else:
        between = _table(
            depth=spans.number[current],
            document=spans.document[current],
            source=spans.holder[current],
            target=spans.holder[following],
            own_state=spans.state_out[current],
            carries_from=carries_from[current],
            rows=spans.rows[current],
            target_slot=spans.state_in[following],
        )
    if backward:
        return [between] + [
            _table(
                depth=0,
                document=spans.document[ended],
                source=source,
                target=spans.holder[ended],
                own_state=slots,
                carries_from=-1,
                rows=0,
                target_slot=spans.state_out[ended],
            )
            for source, ended, slots in _ends(routes, spans, last, rank)
        ]
    last = last[: last.size * routes.returns_final_state]
    to_end = _table(
        depth=spans.number[last],
        document=spans.document[last],
        source=spans.holder[last],
        target=spans.holder[last],
        own_state=spans.state_out[last],
        carries_from=carries_from[last],
        rows=spans.rows[last],
        target_slot=_end_slots(routes, spans.holder[last]),
    )
    return [between, to_end]


def _round_trip_links(routes: StateRoutes, rank: int, backward: bool) -> list[Ints]:
    """Return the links without causality.

    Sums are passed from run to run of a document, and the sum of all is passed back from the last.
    Nothing decays. Those from documents' ends are the ones that concern a rank.
    """
    runs = _ChainedSpans.of(routes)
    current = np.flatnonzero(runs.behind)
    following = current + 1
    last = np.flatnonzero(runs.behind == 0)
    state = runs.state_in  # the slot both of a run's state and of its station
    stations = [routes.stations(rank, backward).slots.size for rank in range(routes.ranks)]
    passed_on = state + np.array(stations)[runs.holder]  # slots behind those of the stations
    carries_from = np.where(runs.number > 0, passed_on, -1)
    from_end = (runs.number > 0) | (backward and routes.returns_final_state)
    tables = [
        _table(
            depth=runs.number[current],
            document=runs.document[current],
            source=runs.holder[current],
            target=runs.holder[following],
            own_state=state[current],
            carries_from=carries_from[current],
            rows=0,
            target_slot=passed_on[following],
        ),
        _table(
            depth=runs.number[last],
            document=runs.document[last],
            source=runs.holder[last],
            target=runs.holder[last],
            own_state=state[last],
            carries_from=np.where(from_end, passed_on, -1)[last],
            rows=0,
            target_slot=state[last],
        ),
        _table(
            depth=(runs.number + 2 * runs.behind + 2)[following],
            document=runs.document[following],
            source=runs.holder[following],
            target=runs.holder[current],
            own_state=-1,
            carries_from=state[following],
            rows=0,
            target_slot=state[current],
        ),
    ]
    if backward:
        return tables + [
            _table(
                depth=-1,
                document=runs.document[ended],
                source=source,
                target=runs.holder[ended],
                own_state=slots,
                carries_from=-1,
                rows=0,
                target_slot=passed_on[ended],
            )
            for source, ended, slots in _ends(routes, runs, last, rank)
        ]
    last = last[: last.size * routes.returns_final_state]
    to_end = _table(
        depth=runs.number[last] + 1,
        document=runs.document[last],
        source=runs.holder[last],
        target=runs.holder[last],
        own_state=-1,
        carries_from=state[last],
        rows=0,
        target_slot=_end_slots(routes, runs.holder[last]),
    )
    return [*tables, to_end]


def _ends(
    routes: StateRoutes, spans: _ChainedSpans, last: Ints, rank: int
) -> Iterator[tuple[int, Ints, Ints]]:
    """Yield each rank as a source of backward, with the last spans that it sends to, and its slots.

    `last` are the last spans of documents. Of other ranks they are those of which `rank` is the
    holder.
    """
    for source in range(routes.ranks) if routes.returns_final_state else ():
        ended = last if source == rank else last[spans.holder[last] == rank]
        yield source, ended, routes.held(source).states.states_in + spans.document[ended]


def _end_slots(routes: StateRoutes, holders: Ints) -> Ints:
    """Return the slots of documents' ends on the ranks that hold them, document by document."""
    order = np.argsort(holders, kind="stable")
    number = np.empty_like(holders)
    number[order] = count_up(np.bincount(holders, minlength=routes.ranks))
    states_in = [routes.held(rank).states.states_in for rank in range(routes.ranks)]
    return np.array(states_in)[holders] + number
