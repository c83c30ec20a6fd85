"""All-Scan's rounds under a layout: which hops a rank takes in each, and with which states.

A block of a state takes a hop of depth d in round d + its number. So what a round sends depends on
what arrived in earlier ones, and all ranks go through the rounds in one order.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

from seqpar.core.arguments import Ints
from seqpar.linear.chains import Hop
from seqpar.linear.indices import Index, index_of


class Carrying(NamedTuple):
    """Sums that a message carries on: they are added to its links.

    Attributes:
        message: the message's number.
        carriers: how many of its links carry a sum, the first ones; None: all.
        carried: the arrivals with these sums.
    """

    message: int
    carriers: int | None
    carried: Index


class Round(NamedTuple):
    """What a rank does in one round, in this order. Messages and places are numbers of them.

    All numbers count blocks: first those of the first block, then those of the second, …

    Attributes:
        number: the round's.
        carrying: what the round's messages carry on.
        kept: (message, place) of hops from this rank to itself.
        sends, recvs: (rank, message) and (rank, place) of all other hops.
        reaches: whether a hop brings the rank anything.
        added: (to, what): arrivals that these hops bring to stations that others have reached
            before, and those others, to which they are added.
    """

    number: int
    carrying: list[Carrying]
    kept: list[tuple[int, int]]
    sends: list[tuple[int, int]]
    recvs: list[tuple[int, int]]
    reaches: bool
    added: list[tuple[Index, Index]]


class _Take(NamedTuple):
    """A hop from a rank, or to it, or both, that one block of states takes.

    Message and place are −1 where it does not leave the rank, or brings it nothing.
    """

    source: int
    target: int
    message: int
    place: int
    carrying: list[Carrying]
    added: list[tuple[Index, Index]]


class Rounds:
    """One rank's rounds in one pass, with their tables on a device.

    A state, of so many `rows`, is cut into blocks of equal size. Links and arrivals are those of
    the first block, then those of the second, … `sources` and `stations` are how many there are on
    the rank, whose `hops` these are.

    Attributes:
        rounds: those in which the rank does anything.
        blocks, rows: how many blocks a state has, and a block rows, of Dv elements.
        states: (links,) the blocks of states that links begin with; the number of these: none, for
            which `pads` says that there are such links.
        leaving, reaching: how many links each message has, and how many arrivals each place; where
            nothing reaches some station, the last place has one, of zeros.
        arrivals: how many there are.
        stations: how many there are.
        sums: (stations · blocks,) the arrivals with the sums at stations: all blocks of each
            station, by slot.
        carriers: of each message that carries sums, how many of its links do; None: all.
        travels: whether anything is sent or received.
    """

    def __init__(
        self,
        hops: list[Hop],
        rank: int,
        sources: int,
        stations: int,
        rows: int,
        blocks: int,
        device: torch.device,
    ) -> None:
        self.blocks, self.rows, self.stations = blocks, rows // blocks, stations
        leaving = [hop for hop in hops if hop.source == rank]
        self.leaving = [hop.rows.size for hop in leaving] * blocks
        reaching = [hop for hop in hops if hop.target == rank]
        self.reaching = [hop.rows.size for hop in reaching] * blocks
        self.travels = any(hop.source != hop.target for hop in hops)

        states = joined([hop.own_states for hop in leaving])
        self.pads = bool((states < 0).any())
        of_blocks = states * blocks + np.arange(blocks)[:, None]
        of_blocks = np.where(states < 0, sources * blocks, of_blocks).ravel()
        self.states = torch.from_numpy(of_blocks).to(device)

        reached = joined([hop.target_slots for hop in reaching])
        slots, first = np.unique(reached, return_index=True)
        block, at_station = np.arange(blocks), slots < stations
        sums = np.full((stations, blocks), blocks * reached.size)  # where nothing arrives
        self.reaching.append(int(at_station.sum() < stations))
        self.arrivals = sum(self.reaching)
        sums[slots[at_station]] = first[at_station, None] + block * reached.size
        self.sums = torch.from_numpy(sums.ravel()).to(device)

        planned = [
            _plan(hops, rank, block, reached, slots, first, device) for block in range(blocks)
        ]
        order = sorted((x.depth + b, i, b) for i, x in enumerate(hops) for b in range(blocks))
        self.rounds = [
            _round(number, rank, [planned[block][i] for _, i, block in part])
            for number, part in itertools.groupby(order, key=lambda x: x[0])
        ]
        self.carriers = {x.message: x.carriers for each in self.rounds for x in each.carrying}


def _plan(
    hops: list[Hop],
    rank: int,
    block: int,
    reached: Ints,
    slots: Ints,
    first: Ints,
    device: torch.device,
) -> list[_Take]:
    """Return how a block takes each hop; of `reached` slots, slots[i] is reached first[i]-th."""
    taken, before = [], block * reached.size
    messages = itertools.count(block * sum(hop.source == rank for hop in hops))
    places = itertools.count(block * sum(hop.target == rank for hop in hops))
    arrived = 0
    for hop in hops:
        message, place, carrying, added = -1, -1, [], []
        sums = hop.carries_from[hop.carries_from >= 0 if hop.source == rank else slice(0)]
        if hop.source == rank:
            message = next(messages)
        if hop.target == rank:
            place = next(places)
            numbers = arrived + np.arange(hop.rows.size)
            earlier = first[np.searchsorted(slots, reached[numbers])]
            again = earlier < numbers
            if again.any():
                to, what = (index_of(before + x[again], device) for x in (earlier, numbers))
                added.append((to, what))
            arrived += numbers.size
        if sums.size:
            carried = index_of(before + first[np.searchsorted(slots, sums)], device)
            carriers = None if sums.size == hop.rows.size else sums.size
            carrying.append(Carrying(message, carriers, carried))
        taken.append(_Take(hop.source, hop.target, message, place, carrying, added))
    return taken


def _round(number: int, rank: int, taken: list[_Take]) -> Round:
    leaving = [x for x in taken if x.source == rank]
    reaching = [x for x in taken if x.target == rank]
    return Round(
        number,
        carrying=[x for take in leaving for x in take.carrying],
        kept=[(x.message, x.place) for x in leaving if x.target == rank],
        sends=[(x.target, x.message) for x in leaving if x.target != rank],
        recvs=[(x.source, x.place) for x in reaching if x.source != rank],
        reaches=bool(reaching),
        added=[x for take in reaching for x in take.added],
    )


def joined(parts: list[Ints]) -> Ints:
    """Return the concatenation of any number of arrays, none included."""
    return np.concatenate([np.empty(0, np.int64), *parts])
