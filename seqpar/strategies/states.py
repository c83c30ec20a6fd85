"""Which states of linear attention go where: the sources on each rank, and the stations that need sums of them.

A *source* is a state and the position behind its last row; a *station* is a position that needs the sum of all states of its
document before it, each decayed over the rows in between. In forward the sources are spans' own states, and the stations the
starts of spans. In backward it is the other way round, with positions counted from the documents' ends. If final states are
returned, the end of each document is a station on every rank in forward, and a source on every rank in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.geometry import Geometry, Ints, keys, numbers
from seqpar.linear import Recurrence, Spans


class Points(NamedTuple):
    """A rank's sources or stations, by document, then position. `slots` says where each stands in a tensor of states
    (n, B, Hkv, D, Dv): those of spans in the order of the spans, then those of documents' ends."""

    documents: Ints
    positions: Ints
    slots: Ints

    @property
    def keys(self) -> Ints:
        return keys(self.documents, self.positions)


class Pieces(NamedTuple):
    """What a rank holds: its spans, or without causality its runs."""

    documents: Ints
    starts: Ints
    stops: Ints
    spans: Spans


@dataclass(frozen=True)
class Route:
    """From one rank's sources to another's stations: which sources compose into one state, and for which station."""

    members: Ints  # slots of sources
    groups: Ints  # (members,) ascending: the composed state that each belongs to
    ages: Ints  # (members,) rows between a source and the last one of its group
    stations: Ints  # (groups,) slots
    rest: Ints  # (groups,) rows between the last source of a group and its station

    def compose(self, states: Tensor, recurrence: Recurrence) -> Tensor:
        """(groups, B, Hkv, D, Dv), the states to send; `states` themselves where these are they."""
        if np.array_equal(self.members, np.arange(len(states))) and len(self.groups) == len(self.stations):
            return states
        composed = states.new_zeros((len(self.stations), *states.shape[1:]))
        for part in nth_of_each(self.groups):
            composed[self.groups[part]] += states[self.members[part]] * weights(recurrence, self.ages[part], states)
        return composed

    def arrive(self, sums: Tensor, composed: Tensor, recurrence: Recurrence) -> None:
        """Add composed states to what their stations (n, B, Hkv, D, Dv) have."""
        if len(self.stations):
            sums[self.stations] += composed * weights(recurrence, self.rest, sums)


class Plan:
    """Sources and stations of all ranks under a layout; made once, and kept with it.

    `causal`, or else all states of a document go to all of its places. `returned`: final states are. `begun`: documents go on
    from initial states.
    """

    def __init__(self, geometry: Geometry, causal: bool, returned: bool, begun: bool) -> None:
        self.lengths, self.holdings = geometry.lengths, geometry.holdings  # not the geometry, which owns this
        self.causal, self.returned, self.begun = causal, returned, begun
        self.lowered: dict[object, Any] = {}  # what transports derive
        self._pieces: dict[int, Pieces] = {}
        self._points: dict[tuple[int, bool], tuple[Points, Points]] = {}
        self._routes: dict[tuple[int, int, bool], Route] = {}

    @classmethod
    def of(cls, geometry: Geometry, causal: bool, returned: bool, begun: bool) -> Plan:
        key = causal, returned, begun
        if key not in geometry.plans:
            geometry.plans[key] = cls(geometry, causal, returned, begun)
        return geometry.plans[key]

    def pieces(self, rank: int) -> Pieces:
        if rank not in self._pieces:
            held = self.holdings[rank]
            documents, starts, stops, edges = held.documents, held.starts, held.stops, held.offsets
            if not self.causal:
                documents, first, _ = held.runs
                edges, starts = edges[np.r_[first, starts.size]], np.zeros_like(documents)
                stops = starts
            enters = (starts > 0) | self.begun | (not self.causal)
            leaves = (stops < self.lengths[documents]) | self.returned | (not self.causal)
            enter, leave = (np.where(wanted, np.cumsum(wanted) - 1, -1) for wanted in (enters, leaves))
            self._pieces[rank] = Pieces(documents, starts, stops, Spans(edges, enter, leave))
        return self._pieces[rank]

    def sources(self, rank: int, reverse: bool) -> Points:
        return self._of(rank, reverse)[0]

    def stations(self, rank: int, reverse: bool) -> Points:
        return self._of(rank, reverse)[1]

    def route(self, source: int, station: int, reverse: bool) -> Route:
        """From the sources of one rank to the stations of another, or of its own."""
        key = source, station, reverse
        if key not in self._routes:
            sources, stations = self.sources(source, reverse), self.stations(station, reverse)
            target = np.searchsorted(stations.keys, sources.keys)  # the first that is not before it
            inside = np.flatnonzero(target < stations.keys.size)
            inside = inside[stations.documents[target[inside]] == sources.documents[inside]]
            reached, groups = np.unique(target[inside], return_inverse=True)
            positions = sources.positions[inside]
            latest = np.zeros_like(reached)
            latest[groups] = positions  # the last of each group, since positions ascend
            self._routes[key] = Route(
                sources.slots[inside], groups, latest[groups] - positions,
                stations.slots[reached], stations.positions[reached] - latest,
            )  # fmt: skip
        return self._routes[key]

    def _of(self, rank: int, reverse: bool) -> tuple[Points, Points]:
        if (rank, reverse) not in self._points:
            documents, starts, stops, spans = self.pieces(rank)
            ended = np.arange(self.lengths.size * self.returned)
            at_start = self._points_of(documents, starts, spans.enter, ended, reverse)
            at_stop = self._points_of(documents, stops, spans.leave, ended[:0], reverse)
            self._points[rank, reverse] = (at_start, at_stop) if reverse else (at_stop, at_start)
        return self._points[rank, reverse]

    def _points_of(self, documents: Ints, positions: Ints, slots: Ints, ended: Ints, reverse: bool) -> Points:
        wanted = slots >= 0
        positions = np.r_[positions[wanted], self.lengths[ended] * self.causal]
        documents, slots = np.r_[documents[wanted], ended], np.r_[slots[wanted], wanted.sum() + np.arange(ended.size)]
        if reverse and self.causal:
            positions = self.lengths[documents] - positions
        order = np.lexsort((slots, positions, documents))
        return Points(documents[order], positions[order], slots[order])


def add_earlier(sums: Tensor, stations: Points, recurrence: Recurrence) -> None:
    """Add to each station what its document's stations before it have. In place; sums (stations, B, Hkv, D, Dv)."""
    for depth in list(nth_of_each(stations.documents))[1:]:
        rows = stations.positions[depth] - stations.positions[depth - 1]
        sums[stations.slots[depth]] += sums[stations.slots[depth - 1]] * weights(recurrence, rows, sums)


def weights(recurrence: Recurrence, rows: Ints, like: Tensor) -> Tensor:
    """(n, 1, Hkv, 1, 1): λ^rows, for states `like` (…, B, Hkv, D, Dv)."""
    powers = recurrence.power(torch.from_numpy(rows).to(like.device), like.shape[-3])
    return powers.to(like.dtype)[:, None, :, None, None]


def nth_of_each(ascending: Ints) -> Iterator[Ints]:
    """Of ascending integers: where the first of each stand, then where the second of each do, and so on."""
    number = numbers(np.unique(ascending, return_counts=True)[1])
    order = np.argsort(number, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if number.size else ()
