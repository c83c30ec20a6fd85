"""Plan LASP-2's exchange for a layout: the states that a rank composes, and their receivers."""

from __future__ import annotations

import numpy as np
import torch

from seqpar.attention.operands import OperandShape
from seqpar.linear.routes import Route, StateRoutes, StateSums
from seqpar.linear.states.options import StateOptions
from seqpar.linear.states.sums import Sum, SumsOnDevice


class Gathering:
    """One rank's part in the exchange of one pass, with its tables on a device.

    It composes states, sends parts of these, and adds up what arrives from all ranks, itself
    included.
    """

    def __init__(
        self,
        routes: StateRoutes,
        rank: int,
        backward: bool,
        shape: OperandShape,
        device: torch.device,
    ) -> None:
        ranks = range(routes.ranks)
        outgoing = [routes.route(rank, peer, backward) for peer in ranks]
        incoming = [routes.route(peer, rank, backward) for peer in ranks]
        stations, rest = (
            np.concatenate(x) for x in zip(*((r.stations, r.rest) for r in incoming), strict=True)
        )
        # The number of states in each part of the composed states, and the part of each rank.
        self._compose, self.sizes, parts = _composed(
            outgoing, routes.sources(rank, backward).slots.size
        )
        # The other ranks that get a part, with its number, and from which states come.
        self.sent = [(p, parts[p]) for p in ranks if p != rank and self.sizes[parts[p]]]
        self.own = parts[rank]  # which it keeps
        self.arriving = [route.stations.size for route in incoming]  # states from each rank
        self.arrivals = sum(self.arriving)
        self.senders = [p for p in ranks if p != rank and self.arriving[p]]
        self.travels = bool(self.sent or self.senders)
        slots = routes.stations(rank, backward).slots.size
        arrive = StateSums.of(stations, np.arange(stations.size), rest, slots)
        sums = [arrive, *_added_up(routes, rank, backward)]
        if self._compose is not None:
            sums.insert(0, self._compose)
        self._sums = SumsOnDevice(sums, shape, device)

    def weigh(self, options: StateOptions) -> list[Sum]:
        """Return the functions of the sums that this rank computes, in order.

        The first composes states, the second adds arriving states at each station, by slot, and the
        others also add the sums of all earlier stations of its document.
        """
        unchanged: list[Sum] = [lambda states: states] if self._compose is None else []
        return unchanged + self._sums.weigh(options)


def _composed(outgoing: list[Route], states: int) -> tuple[StateSums | None, list[int], list[int]]:
    """Return the sums of states to send, the sizes of their parts, and each route's part.

    Routes that take the same states share a part. If the sums are None, the states are sent
    themselves.
    """
    numbers: dict[bytes, int] = {}
    sizes: list[int] = []
    columns, parts = [], []
    for route in outgoing:
        key = np.concatenate([route.members, route.groups, route.ages]).tobytes()
        if key not in numbers:
            numbers[key] = len(sizes)
            columns.append((route.groups + sum(sizes), route.members, route.ages))
            sizes.append(route.stations.size)
        parts.append(numbers[key])
    groups, members, ages = (np.concatenate(x) for x in zip(*columns, strict=True))
    alone = sum(sizes) == groups.size == states
    if alone and np.array_equal(members, np.arange(states)):
        return None, sizes, parts
    return StateSums.of(groups, members, ages, sum(sizes)), sizes, parts


def _added_up(routes: StateRoutes, rank: int, backward: bool) -> list[StateSums]:
    """Return the steps of a scan over a rank's stations.

    In each step a station gets the sum of the station 1, then 2, then 4, … before it.
    """
    documents, positions, slots = routes.stations(rank, backward)
    steps, apart = [], 1
    while (after := np.flatnonzero(documents[apart:] == documents[:-apart]) + apart).size:
        before = after - apart
        groups = np.r_[slots, slots[after]]
        members, rows = np.r_[slots, slots[before]], positions[after] - positions[before]
        rows = np.r_[np.zeros_like(slots), rows]
        steps.append(StateSums.of(groups, members, rows, slots.size))
        apart *= 2
    return steps
