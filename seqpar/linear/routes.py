"""Route states: the sources on each rank, and the stations that need sums of them.

A *source* is a state and the position after its last row. A *station* is a position that needs the
sum of all states of its document before that position, each decayed over the rows in between. In
forward the sources are the states of spans, at the spans' ends, and the stations are the starts of
spans. In backward the sources are gradients of states at the starts of spans, and the stations are
the ends of spans, with positions counted from the documents' ends. The *slot* of a source or
station is the index of its state in a tensor of states.

If final states are returned, the end of each document is also a station in forward, on the rank
that holds the document's last token. That rank then sends the sum to all ranks (`final_states.py`),
so that all ranks have the same bits. In backward the end of a document is a source on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints
from seqpar.core.memo import Memo
from seqpar.core.ranges import sort_keys
from seqpar.layout.geometry import Geometry


@dataclass(frozen=True, eq=False)
class SpanStates:
    """A rank's spans, and which states enter and leave them.

    Tensors of states have only the states that are needed, so each span has indices into these
    tensors. Without causality the elements are runs instead of spans.
    """

    edges: Ints  # (spans + 1,) span i is rows edges[i] … edges[i + 1] − 1
    # (spans,) the index, among all states that enter spans, of the state that enters the span; −1
    # for a span that no state enters
    state_in: Ints
    # (spans,) the index, among all states that leave spans, of the state that leaves the span; −1
    # if no rank needs that state
    state_out: Ints
    derived: Memo = field(default_factory=Memo, repr=False)  # what backends derive from the spans

    @cached_property
    def states_in(self) -> int:
        return int((self.state_in >= 0).sum())

    @cached_property
    def states_out(self) -> int:
        return int((self.state_out >= 0).sum())


class StatePoints(NamedTuple):
    """A rank's sources or stations, sorted by document, then position.

    `slots` has the index of each in a tensor of states (n, B, Hkv, D, Dv). In such a tensor the
    states of spans come first, in the order of the spans, then the states of documents' ends.
    """

    documents: Ints
    positions: Ints
    slots: Ints


class HeldSpans(NamedTuple):
    """A rank's spans, or without causality its runs, and which states enter and leave them."""

    documents: Ints
    starts: Ints
    stops: Ints
    ends: NDArray[np.bool_]  # whether they have their document's last token
    states: SpanStates


@dataclass(frozen=True)
class Route:
    """The states that one rank's sources send to another rank's stations.

    Sources that reach the same station first are a *group*: they are composed into one state, which
    is sent.
    """

    members: Ints  # slots of the sources that are sent
    groups: Ints  # (members,) the index of each member's group, ascending
    ages: Ints  # (members,) rows between a source and the last source of its group
    stations: Ints  # (groups,) the slot of the station that each group reaches
    rest: Ints  # (groups,) rows between the last source of a group and the group's station


class StateSums(NamedTuple):
    counts: Ints  # (groups,) number of members of each group; a sum without members is 0
    members: Ints  # (n,) slots of states, one group after another, added in this order
    rows: Ints  # (n,) number of rows over which each state decays

    @classmethod
    def of(cls, groups: Ints, members: Ints, rows: Ints, count: int) -> StateSums:
        """Return the sums of `count` groups, given the group of each member, in any order."""
        order = np.argsort(groups, kind="stable")
        return cls(np.bincount(groups, minlength=count), members[order], rows[order])


class StateRoutes:
    """Sources and stations of all ranks under a layout; made once, and kept with the layout.

    Without `causal`, all states of a document are sent to all of its stations, and all positions
    count as 0. Methods take `backward` to choose the pass.
    """

    def __init__(
        self, geometry: Geometry, causal: bool, returns_final_state: bool, has_initial_state: bool
    ) -> None:
        # The geometry owns this object, so a reference to the geometry would be a cycle.
        self.lengths, self.holdings = geometry.lengths, geometry.holdings
        self.causal, self.ranks = causal, geometry.ranks
        self.returns_final_state, self.has_initial_state = returns_final_state, has_initial_state
        self.derived = Memo()

    @classmethod
    def of(
        cls, geometry: Geometry, causal: bool, returns_final_state: bool, has_initial_state: bool
    ) -> StateRoutes:
        flags = causal, returns_final_state, has_initial_state
        return geometry.derived(("state routes", flags), lambda: cls(geometry, *flags))

    def held(self, rank: int) -> HeldSpans:
        return self.derived(("held", rank), lambda: self._held(rank))

    def ended(self, rank: int) -> Ints:
        """Return the documents whose final states a rank sends to all ranks, ascending."""

        held = self.held(rank)
        return self.derived(
            ("ended", rank), lambda: held.documents[held.ends & self.returns_final_state]
        )

    def sources(self, rank: int, backward: bool) -> StatePoints:
        return self._points(rank, backward)[0]

    def stations(self, rank: int, backward: bool) -> StatePoints:
        return self._points(rank, backward)[1]

    def route(self, source: int, target: int, backward: bool) -> Route:
        key = "route", source, target, backward
        return self.derived(key, lambda: self._route(source, target, backward))

    def of_initial(self, rank: int) -> StateSums:
        """Return the sums of initial states, which are added to a rank's stations, by slot."""
        documents, positions, slots = self.stations(rank, backward=False)
        return StateSums.of(slots, documents, positions, slots.size)

    def of_dinitial(self, rank: int) -> StateSums:
        """Return the initial states' gradients as sums over a rank's sources in backward."""
        documents, positions, slots = self.sources(rank, backward=True)
        # The initial state decays over the rows before the source's position.
        before = self.lengths[documents] * self.causal - positions
        return StateSums.of(documents, slots, before, self.lengths.size)

    def _held(self, rank: int) -> HeldSpans:
        held = self.holdings[rank]
        (documents, starts, stops), edges = held.columns, held.offsets
        ends = stops == self.lengths[documents]
        if not self.causal:
            documents, first, stop = held.runs
            edges, ends = edges[np.r_[first, starts.size]], ends[stop - 1]
            starts = stops = np.zeros_like(documents)
        enters = (starts > 0) | self.has_initial_state | (not self.causal)
        leaves = ~ends | self.returns_final_state | (not self.causal)
        state_in, state_out = (np.where(some, np.cumsum(some) - 1, -1) for some in (enters, leaves))
        return HeldSpans(documents, starts, stops, ends, SpanStates(edges, state_in, state_out))

    def _route(self, source: int, target: int, backward: bool) -> Route:
        sources, stations = self.sources(source, backward), self.stations(target, backward)
        # For each source, the first station of the document that is not before the source.
        at_stations, at_sources = (sort_keys(x.documents, x.positions) for x in (stations, sources))
        reached = np.searchsorted(at_stations, at_sources)
        inside = np.flatnonzero(reached < stations.slots.size)
        inside = inside[stations.documents[reached[inside]] == sources.documents[inside]]
        reached, positions = reached[inside], sources.positions[inside]
        begins = np.diff(reached, prepend=-1) > 0  # a group; stations are reached in order
        reached, groups = reached[begins], np.cumsum(begins) - 1
        latest = np.zeros_like(reached)
        latest[groups] = positions  # the last assignment counts: the latest, as positions ascend
        return Route(
            members=sources.slots[inside],
            groups=groups,
            ages=latest[groups] - positions,
            stations=stations.slots[reached],
            rest=stations.positions[reached] - latest,
        )

    def _points(self, rank: int, backward: bool) -> tuple[StatePoints, StatePoints]:
        def build() -> tuple[StatePoints, StatePoints]:
            documents, starts, stops, _, states = self.held(rank)
            ended = self.ended(rank)
            if backward:
                ended = np.arange(self.lengths.size * self.returns_final_state)
            at_start = self._points_at(documents, starts, states.state_in, ended, backward)
            at_stop = self._points_at(documents, stops, states.state_out, ended[:0], backward)
            return (at_start, at_stop) if backward else (at_stop, at_start)

        return self.derived(("points", rank, backward), build)

    def _points_at(
        self, documents: Ints, positions: Ints, slots: Ints, ended: Ints, backward: bool
    ) -> StatePoints:
        """Return the points of spans that have a slot, and of the ends of the documents `ended`."""
        has_slot = slots >= 0
        positions = np.r_[positions[has_slot], self.lengths[ended] * self.causal]
        documents = np.r_[documents[has_slot], ended]
        slots = np.r_[slots[has_slot], has_slot.sum() + np.arange(ended.size)]
        if backward and self.causal:
            positions = self.lengths[documents] - positions
        order = np.lexsort((slots, positions, documents))
        return StatePoints(documents[order], positions[order], slots[order])
