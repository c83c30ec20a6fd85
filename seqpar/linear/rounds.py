"""All-Scan's rounds under a layout: which hops a rank takes in each, and with which states.

A block of a state takes a hop of depth d in round d + its number. So what a round sends depends on
what arrived in earlier ones, and all ranks go through the rounds in one order.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.arguments import Ints
from seqpar.dtypes import accumulator_dtype
from seqpar.linear.chains import Hop, hops_of
from seqpar.linear.routes import StateRoutes
from seqpar.linear.spans import LinearOptions
from seqpar.operands import OperandShape

Index = slice | Tensor


class PlannedHop(NamedTuple):
    """A hop from a rank, or to it, or both, by the numbers of its links and of what reaches it.

    Attributes:
        source, target: ranks.
        links: those of the rank that take the hop; None: it does not leave the rank.
        carriers: of these, those that carry a sum; None: none does.
        carried: the arrivals with these sums.
        arrivals: what the hop brings the rank; None: nothing.
        added: (to, what): arrivals that it brings to stations that others have reached before, and
            those others, to which they are added; None: there are none.
    """

    source: int
    target: int
    links: slice | None
    carriers: slice | None
    carried: Index
    arrivals: slice | None
    added: tuple[Index, Index] | None


Place = tuple[PlannedHop, int]  # a hop, and the number of the block of states that takes it


class Rounds:
    """One rank's rounds in one pass, with their tables on a device.

    Attributes:
        rounds: the number of each, and its hops.
        cuts: the blocks: rows of a state as a matrix (B·Hkv·D, Dv).
        states: (links,) the states that links begin with; the number of states: none, for which
            `pads` says that there are such links.
        arriving: how many arrivals there are.
        sums: the arrivals with the sums at stations, and `slots` the slots of these.
        travels: whether anything is sent or received.
    """

    def __init__(
        self,
        routes: StateRoutes,
        rank: int,
        backward: bool,
        blocks: int,
        shape: OperandShape,
        device: torch.device,
    ) -> None:
        self._shape, self.cuts = shape, blocks_of(shape, blocks)
        hops = hops_of(routes, rank, backward)
        leaving = [hop for hop in hops if hop.source == rank]
        reached = _joined([hop.target_slots for hop in hops if hop.target == rank])
        states = _joined([hop.own_states for hop in leaving])
        self.pads, count = bool((states < 0).any()), routes.sources(rank, backward).slots.size
        self.states = torch.from_numpy(np.where(states < 0, count, states)).to(device)
        rows = _joined([hop.rows for hop in leaving]).astype(np.float64)
        self._rows = torch.from_numpy(rows[:, None]).to(device)
        self.arriving = reached.size
        slots, first = np.unique(reached, return_index=True)
        at_station = slots < routes.stations(rank, backward).slots.size
        self.slots, self.sums = (_index(x[at_station], device) for x in (slots, first))
        planned = _plan(hops, rank, reached, slots, first, device)
        self.travels = bool(self.cuts) and any(hop.source != hop.target for hop in hops)
        order = sorted(
            (x.depth + b, i, b) for i, x in enumerate(hops) for b in range(len(self.cuts))
        )
        self.rounds: dict[int, list[Place]] = {}
        for number, i, block in order:
            self.rounds.setdefault(number, []).append((planned[i], block))

    def weights(self, options: LinearOptions) -> list[Tensor | None]:
        """Return for each block what links multiply sums with, (links, rows, 1); None: nothing."""
        if options.log_decay is None:
            return [None] * len(self.cuts)
        s = self._shape
        powers = torch.exp(self._rows * options.log_decay).to(accumulator_dtype(s.dtype))
        powers = powers[:, None, :, None].expand(-1, s.batch, s.kv_heads, s.dim).flatten(1)
        return [powers[:, cut, None] for cut in self.cuts]


def blocks_of(shape: OperandShape, blocks: int) -> list[slice]:
    """Return the rows of each block of a state, as a matrix of B·Hkv·D rows.

    There are fewer blocks where there are not so many rows.
    """
    rows = shape.batch * shape.kv_heads * shape.dim
    edges = np.unique(np.linspace(0, rows, min(blocks, rows) + 1).astype(int)).tolist()
    return list(itertools.starmap(slice, itertools.pairwise(edges)))


def _plan(
    hops: list[Hop], rank: int, reached: Ints, slots: Ints, first: Ints, device: torch.device
) -> list[PlannedHop]:
    """Return the hops as planned; what reaches the slot slots[i] first is arrival first[i]."""
    planned, left, arrived = [], 0, 0
    for hop in hops:
        links = carriers = arrivals = added = None
        carried: Index = slice(0)
        count = hop.rows.size
        if hop.source == rank:
            links = slice(left, left + count)
            sums = hop.carries_from[hop.carries_from >= 0]
            if sums.size:
                carriers = slice(left, left + sums.size)
                carried = _index(first[np.searchsorted(slots, sums)], device)
            left += count
        if hop.target == rank:
            arrivals, numbers = slice(arrived, arrived + count), np.arange(arrived, arrived + count)
            earlier = first[np.searchsorted(slots, reached[arrivals])]
            again = earlier < numbers
            if again.any():
                added = _index(earlier[again], device), _index(numbers[again], device)
            arrived += count
        planned.append(
            PlannedHop(hop.source, hop.target, links, carriers, carried, arrivals, added)
        )
    return planned


def _index(numbers: Ints, device: torch.device) -> Index:
    """Return the numbers as a slice, where they are one, else on the device."""
    if numbers.size and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.from_numpy(numbers).to(device)


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])
