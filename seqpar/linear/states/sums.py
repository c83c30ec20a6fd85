"""Compute weighted sums of states, and plan LASP-2's exchange.

    sums[g] = Σ λ^rows · states[member]

Each sum is over a group of states. `rows` is the number of rows over which a state decays before it
is added. Sums and states are (n, B, Hkv, D, Dv). One call of torch.embedding_bag computes all sums,
without atomic additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.core.device_tables import TableHolder
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.ranges import count_up, ranges
from seqpar.linear.routes import Route, StateRoutes, StateSums
from seqpar.linear.states.state_options import StateOptions

Sum = Callable[[Tensor], Tensor]  # from states to their sums


class WeightedSums(TableHolder):
    def __init__(self, sums: Sequence[StateSums], shape: OperandShape) -> None:
        # A *bag*, in the words of torch.embedding_bag, is the sum of one group for one batch entry
        # and one head. A row of a bag has the D·Dv elements of a state.
        self._dtype, lanes = accumulator_dtype(shape.dtype), shape.batch * shape.kv_heads
        self._sums: list[tuple[int, Tensor, Tensor]] = []  # (groups, members, edges of groups)
        rows, lanes_of = [], []
        for each in sums:
            count, start = (
                np.repeat(x, lanes) for x in (each.counts, np.cumsum(each.counts) - each.counts)
            )
            member = ranges(start, start + count)
            lane = np.repeat(count_up(np.full_like(each.counts, lanes)), count)
            members, edges = each.members[member] * lanes + lane, np.r_[0, np.cumsum(count)]
            tables = torch.from_numpy(members), torch.from_numpy(edges)
            self._sums.append((each.counts.size, *tables))
            rows.append(each.rows[member])
            lanes_of.append(lane)
        self._sizes = [x.size for x in rows]
        columns = np.concatenate(rows).astype(np.float64), np.concatenate(lanes_of) % shape.kv_heads
        self._rows, self._heads = map(torch.from_numpy, columns)

    def weigh(self, options: StateOptions) -> list[Sum]:
        """Compute the weights. Return a function for each of the `StateSums`, which computes the
        sums from states.
        """
        weights: Sequence[Tensor | None] = [None] * len(self._sums)
        if options.log_decay is not None:
            powers = torch.exp(self._rows * options.log_decay[self._heads])
            weights = powers.to(self._dtype).split(self._sizes)
        return [partial(_sum, *x, weight) for x, weight in zip(self._sums, weights, strict=True)]


def _sum(
    groups: int, members: Tensor, edges: Tensor, weights: Tensor | None, states: Tensor
) -> Tensor:
    matrix = states.reshape(-1, states.shape[-2] * states.shape[-1])
    # One call computes the sums of all bags (mode 0 means sum).
    sums = torch.embedding_bag(
        matrix, members, edges, mode=0, per_sample_weights=weights, include_last_offset=True
    )[0]
    return sums.view(groups, *states.shape[1:])


class Gathering(TableHolder):
    """The messages and sums of one rank in LASP-2's exchange, for one pass.

    The rank combines its states, sends the combined states to other ranks, and adds up the states
    that arrive from all ranks, including itself.
    """

    def __init__(
        self,
        routes: StateRoutes,
        rank: int,
        backward: bool,
        shape: OperandShape,
    ) -> None:
        ranks = range(routes.ranks)
        outgoing = [routes.route(rank, peer, backward) for peer in ranks]
        incoming = [routes.route(peer, rank, backward) for peer in ranks]
        stations, rest = (
            np.concatenate(x) for x in zip(*((r.stations, r.rest) for r in incoming), strict=True)
        )
        # A part is the combined states that this rank sends to one rank, or to several ranks that
        # need the same states. `sizes` has the number of states in each part, and `parts` has the
        # index of each rank's part.
        self._compose, self.sizes, parts = _composed(
            outgoing, routes.sources(rank, backward).slots.size
        )
        # The other ranks to which a part is sent, each with the index of the part.
        self.sent = [(p, parts[p]) for p in ranks if p != rank and self.sizes[parts[p]]]
        self.own = parts[rank]  # the index of the part that stays on this rank
        # How many states arrive from each rank.
        self.arriving = [route.stations.size for route in incoming]
        self.arrivals = sum(self.arriving)
        # The other ranks from which states arrive.
        self.senders = [p for p in ranks if p != rank and self.arriving[p]]
        self.travels = bool(self.sent or self.senders)
        slots = routes.stations(rank, backward).slots.size
        arrive = StateSums.of(stations, np.arange(stations.size), rest, slots)
        sums = [arrive, *_added_up(routes, rank, backward)]
        if self._compose is not None:
            sums.insert(0, self._compose)
        self._sums = WeightedSums(sums, shape)

    def weigh(self, options: StateOptions) -> list[Sum]:
        """Return the functions with which this rank computes sums, in the order of their calls.

        The first function combines the rank's states into the states that are sent. The second
        function adds up the arrived states at each position at which the rank needs a sum. All
        further functions add, to each sum, the earlier sums of the document.
        """
        unchanged: list[Sum] = [lambda states: states] if self._compose is None else []
        return unchanged + self._sums.weigh(options)


def _composed(outgoing: list[Route], states: int) -> tuple[StateSums | None, list[int], list[int]]:
    """Return the sums that combine the states of this rank into the states that it sends.

    `outgoing` says, for each receiving rank, which states are combined. The result has the sums,
    the number of states in each different message, and the index of the message for each rank. If
    this rank sends its states unchanged, the sums are None.
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
    """Return the steps that add all earlier sums of a document to each sum of the document.

    In step i, each sum is increased by the sum that is 2ⁱ places earlier in the document. n sums
    need ⌈log₂ n⌉ steps.
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
