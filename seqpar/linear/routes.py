"""Find the states that ranks send to each other, so that each span gets the state before it.

A *state* is a matrix for each head, which summarises tokens of a document. The state before a
position is the sum of the states of all earlier tokens. This file uses these words:

* A *span* is a range of consecutive tokens of a document on one rank.
* A *run* is all tokens of a document on one rank. Without causality, runs are used instead of
  spans.
* A *source* is a position at which a rank has a state. In forward, each end of a span is a source,
  with the state of the span. In backward, each start of a span is a source, with the gradient of a
  state.
* A *station* is a position at which a rank needs a sum of states. In forward, each start of a span
  is a station. Its sum consists of the states of all earlier sources of the document, each decayed
  over the rows between the source and the station. In backward, each end of a span is a station,
  and positions are counted from the end of the document.
* The *slot* of a source or a station is the index of its state in a tensor of states.

If final states are returned, the end of a document is a station in forward, on the rank that holds
the last token. This rank sends the sum to all ranks (`final_states.py`), so that the sum has the
same bits on all ranks. In the backward of a call that returns final states, the end of a document
is a source on every rank.
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
    """The spans of a rank, and the indices of the states that enter and leave the spans.

    A *span* is a range of consecutive tokens of a document on one rank. Without causality, it is
    all tokens of a document on one rank. A tensor of states contains only the states that are
    needed. The index of a state that is not needed is −1.
    """

    edges: Ints  # (spans + 1,): span i has the rows edges[i] … edges[i + 1] − 1
    # (spans,): the index of the state that enters the span, among all entering states. It is −1 if
    # no state enters.
    state_in: Ints
    # (spans,): the index of the state that leaves the span, among all leaving states. It is −1 if
    # no rank needs the state.
    state_out: Ints
    derived: Memo = field(default_factory=Memo, repr=False)  # what backends derive from the spans

    @cached_property
    def states_in(self) -> int:
        return int((self.state_in >= 0).sum())

    @cached_property
    def states_out(self) -> int:
        return int((self.state_out >= 0).sum())


class StatePoints(NamedTuple):
    """Positions of documents, with an index for each position.

    The positions are those at which a rank has a state, or those at which it needs a state. A
    *state* is a matrix for each head, which summarises tokens of a document. `slots` has, for each
    position, the index of its state in a tensor of states (n, B, Hkv, D, Dv). Positions are sorted
    by document, and ascend within a document.
    """

    documents: Ints
    positions: Ints
    slots: Ints


class HeldSpans(NamedTuple):
    documents: Ints
    starts: Ints
    stops: Ints
    ends: NDArray[np.bool_]  # whether each contains the last token of its document
    states: SpanStates


@dataclass(frozen=True)
class Route:
    """The states that one rank sends to another rank.

    The receiver needs, at some positions of a document, the sum of all earlier states. If it needs
    no sum between two states of the sender, the sender combines the two states into one. A set of
    states that are combined is called a *group*.
    """

    members: Ints  # the slots of the sources
    groups: Ints  # (members,): the group of each source, ascending
    ages: Ints  # (members,): how many rows lie between a source and the last source of its group
    stations: Ints  # (groups,): the slot of the station that comes next
    rest: Ints  # (groups,): how many rows lie between the last source of a group and this station


class StateSums(NamedTuple):
    counts: Ints  # (groups,): the number of states in each sum; a sum without states is 0
    # (n,): the slots of the states, one sum after another, in the order in which they are added.
    members: Ints
    rows: Ints  # (n,): over how many rows each state decays

    @classmethod
    def of(cls, groups: Ints, members: Ints, rows: Ints, count: int) -> StateSums:
        """Return the plan of `count` weighted sums of states.

        The state with the index members[i] in a tensor of states decays over rows[i] rows, and is
        added to the sum with the index groups[i]. A sum without states is 0.
        """
        order = np.argsort(groups, kind="stable")
        return cls(np.bincount(groups, minlength=count), members[order], rows[order])


class StateRoutes:
    """The positions at which each rank of a layout has states, or needs sums of states.

    With `causal`, a sum consists of the states of all earlier tokens of the document, with decay.
    Without `causal`, it consists of all states of the document, without decay. The argument
    `backward` of the methods says whether the plan is for a backward.
    """

    def __init__(
        self, geometry: Geometry, causal: bool, returns_final_state: bool, has_initial_state: bool
    ) -> None:
        # The geometry stores this object. A reference from here to the geometry would be a cycle.
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
        """Return the documents whose final states a rank sends to all ranks, in ascending order."""

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
        """Return how the initial states of documents contribute to the states that a rank needs.

        For each position at which the rank needs a state, the result has a sum with one term: the
        initial state of the document, decayed over the rows before the position.
        """
        documents, positions, slots = self.stations(rank, backward=False)
        return StateSums.of(slots, documents, positions, slots.size)

    def of_dinitial(self, rank: int) -> StateSums:
        """Return how a rank computes its contribution to the gradient of each document's initial
        state.

        For each document, the result has a sum whose terms are gradients of states that this rank
        computes in backward.
        """
        documents, positions, slots = self.sources(rank, backward=True)
        # The initial state decays over the rows before the position.
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
        # For each source, the first station of its document at or after the source.
        at_stations, at_sources = (sort_keys(x.documents, x.positions) for x in (stations, sources))
        reached = np.searchsorted(at_stations, at_sources)
        inside = np.flatnonzero(reached < stations.slots.size)
        inside = inside[stations.documents[reached[inside]] == sources.documents[inside]]
        reached, positions = reached[inside], sources.positions[inside]
        # Whether a new group begins. Sources reach stations in order.
        begins = np.diff(reached, prepend=-1) > 0
        reached, groups = reached[begins], np.cumsum(begins) - 1
        latest = np.zeros_like(reached)
        # The last assignment remains. It is that of the latest source, because positions ascend.
        latest[groups] = positions
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
        """Return points at the given positions, and points at the ends of the documents `ended`.

        A point is a position at which a rank has a state or needs a state. `slots` has the index of
        the state of each position in a tensor of states. Positions with the index −1 are left out.
        """
        has_slot = slots >= 0
        positions = np.r_[positions[has_slot], self.lengths[ended] * self.causal]
        documents = np.r_[documents[has_slot], ended]
        slots = np.r_[slots[has_slot], has_slot.sum() + np.arange(ended.size)]
        if backward and self.causal:
            positions = self.lengths[documents] - positions
        order = np.lexsort((slots, positions, documents))
        return StatePoints(documents[order], positions[order], slots[order])
