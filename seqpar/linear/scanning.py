"""Pass states on from span to span, round by round, while the rank computes.

A block of a state takes a hop of depth d in round d + the block's number, and a rank's sends and
receives of a round are one exchange. A round can send only sums that arrived in earlier rounds. All
ranks go through the rounds in the same order, so no two ranks wait for each other, even where NCCL
runs the exchanges of a communicator one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from seqpar.comm.messages.comm import Comm, Pending
from seqpar.core.arguments import Ints
from seqpar.core.background import run_async
from seqpar.core.device_tables import TableHolder
from seqpar.linear.chains import Hop

Index = slice | Tensor


def as_table(numbers: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers))


def index_of(numbers: Ints) -> Index:
    """Return consecutive numbers as a slice, and others as a table."""
    if (np.diff(numbers) == 1).all():
        first = int(numbers[0]) if numbers.size else 0
        return slice(first, first + numbers.size)
    return as_table(numbers)


class Carrying(NamedTuple):
    """Arrived sums that a message passes on; they are added to its links."""

    message: int
    carriers: int | None  # how many of its first links carry a sum; None: all
    carried: Index  # the arrivals with these sums


class Round(NamedTuple):
    """The steps of a rank in one round, in this order.

    Messages and places (of arriving messages) are numbered: first all of the first block, then all
    of the second, …
    """

    number: int
    carrying: list[Carrying]  # the sums that the round's messages pass on
    kept: list[tuple[int, int]]  # (message, place) of hops from this rank to itself
    sends: list[tuple[int, int]]  # (rank, message) of all other hops
    recvs: list[tuple[int, int]]  # (rank, place)
    # (first, later): pairs of arrivals at the same station; the later one is added to the first
    added: list[tuple[Index, Index]]


class Rounds(TableHolder):
    """One rank's rounds in one pass.

    A state has `rows` rows, which are cut into blocks of equal size. Links and arrivals are
    numbered block by block. `hops`, `sources` and `stations` belong to the rank; the last two are
    counts.
    """

    def __init__(
        self,
        hops: list[Hop],
        rank: int,
        sources: int,
        stations: int,
        rows: int,
        blocks: int,
    ) -> None:
        self.blocks, self.rows, self.stations = blocks, rows // blocks, stations
        # The number of links in each message, and of arrivals in each place. If some station gets
        # no arrival, the last place has one arrival of zeros.
        leaving = [hop for hop in hops if hop.source == rank]
        self.leaving = [hop.rows.size for hop in leaving] * blocks
        reaching = [hop for hop in hops if hop.target == rank]
        self.reaching = [hop.rows.size for hop in reaching] * blocks
        self.travels = any(hop.source != hop.target for hop in hops)

        # (links,) the block of a state that each link begins with. A link without a state has the
        # index after the last block, and `pads` is then True.
        states = joined([hop.own_states for hop in leaving])
        self.pads = bool((states < 0).any())
        of_blocks = states * blocks + np.arange(blocks)[:, None]
        of_blocks = np.where(states < 0, sources * blocks, of_blocks).ravel()
        self.states = as_table(of_blocks)

        reached = joined([hop.target_slots for hop in reaching])
        slots, first = np.unique(reached, return_index=True)
        at_station = slots < stations
        sums = np.full((stations, blocks), blocks * reached.size)  # where nothing arrives
        self.reaching.append(int(at_station.sum() < stations))
        self.arrivals = sum(self.reaching)
        sums[slots[at_station]] = first[at_station, None] + np.arange(blocks) * reached.size
        # (stations · blocks,) the arrivals with the sums at stations: all blocks of each station,
        # by slot.
        self.sums = as_table(sums.ravel())

        order = sorted((x.depth + b, i, b) for i, x in enumerate(hops) for b in range(blocks))
        rounds = {number: Round(number, [], [], [], [], []) for number, _, _ in order}
        messages, places = (
            np.cumsum([x == rank for x in ends]) - 1
            for ends in ([hop.source for hop in hops], [hop.target for hop in hops])
        )
        begins = np.cumsum([0, *(hop.rows.size for hop in reaching)])
        for number, i, block in order:
            hop, now, before = hops[i], rounds[number], block * reached.size
            message = int(messages[i]) + block * len(leaving)
            place = int(places[i]) + block * len(reaching)
            if hop.source == hop.target:
                now.kept.append((message, place))
            elif hop.source == rank:
                now.sends.append((hop.target, message))
            else:
                now.recvs.append((hop.source, place))
            passed = hop.carries_from[hop.carries_from >= 0]
            if hop.source == rank and passed.size:
                carried = index_of(before + first[np.searchsorted(slots, passed)])
                carriers = None if passed.size == hop.rows.size else passed.size
                now.carrying.append(Carrying(message, carriers, carried))
            if hop.target == rank:
                numbers = begins[places[i]] + np.arange(hop.rows.size)
                earlier = first[np.searchsorted(slots, hop.target_slots)]
                again = earlier < numbers
                if again.any():
                    to, what = (index_of(before + x[again]) for x in (earlier, numbers))
                    now.added.append((to, what))
        self.rounds = list(rounds.values())  # in which the rank does anything
        # Of each message that carries sums, how many of its links do; None: all.
        self.carriers = {x.message: x.carriers for each in self.rounds for x in each.carrying}


def joined(parts: list[Ints]) -> Ints:
    """Return the concatenation of any number of arrays, none included."""
    return np.concatenate([np.empty(0, np.int64), *parts])


def start(aside: bool, run: Callable[[], None], *used: Tensor) -> Callable[[], None]:
    """Run a function that uses some tensors, perhaps aside; return one that waits for its end."""
    if aside:
        return run_async(run, *used)
    run()
    return lambda: None


class ScannedStates:
    """The sums of states at a rank's stations, while states are passed on.

    A thread passes them on, or on a GPU a stream, so that the rank computes while states that it
    must pass on have not arrived yet; gloo's receives report their end only to a waiting thread. A
    subclass decides how a sum changes on its way.
    """

    def __init__(self, comm: Comm, plan: Rounds, label: str) -> None:
        self._comm, self._plan, self._label = comm, plan, label
        self.travels = plan.travels

    def _carry(self, number: int, message: Tensor, carried: Tensor) -> None:
        """Add to the links of a message what they carry on, given what has arrived for them."""
        raise NotImplementedError

    def _begin(self, states: Tensor, used: Sequence[Tensor]) -> None:
        """Begin to pass on states. Their second-to-last dimension has the rows that blocks cut.

        `used` are the tensors that `_carry` reads.
        """
        self._states = states
        self._sums = states.new_empty((self._plan.stations, *states.shape[1:]))
        self._join = start(self.travels, self._run, states, self._sums, *used)

    def wait(self) -> Tensor:
        """Return the sums, like the states, by slot."""
        self._join()
        return self._sums

    def _run(self) -> None:
        plan = self._plan
        shape = plan.rows, self._states.shape[-1]
        states = self._states.reshape(len(self._states) * plan.blocks, *shape)
        if plan.pads:
            states = pad(states, (0, 0, 0, 0, 0, 1))  # by a block of zeros
        messages = states.index_select(0, plan.states).split_with_sizes(plan.leaving)
        arrivals = states.new_empty((plan.arrivals, *shape))
        *places, zeros = arrivals.split_with_sizes(plan.reaching)
        if plan.reaching[-1]:
            zeros.zero_()
        arriving: list[tuple[Pending, Round]] = []
        sent: list[Pending] = []
        for now in plan.rounds:
            if now.carrying:
                _arrive(arriving, arrivals)
            for carrying in now.carrying:
                message = messages[carrying.message][: carrying.carriers]
                self._carry(carrying.message, message, arrivals[carrying.carried])
            for message_number, place in now.kept:
                places[place].copy_(messages[message_number])
            sends = [(peer, messages[number]) for peer, number in now.sends]
            recvs = [(peer, places[place]) for peer, place in now.recvs]
            pending = self._comm.exchange(sends, recvs, label=self._label, step=now.number)
            if now.kept or now.recvs:
                arriving.append((pending, now))
            else:
                sent.append(pending)
        _arrive(arriving, arrivals)
        sums = self._sums.view(len(plan.sums), *shape)
        torch.index_select(arrivals, 0, plan.sums, out=sums)
        for pending in sent:
            pending.wait()


def _arrive(arriving: list[tuple[Pending, Round]], arrivals: Tensor) -> None:
    """Wait for arrivals, and add those of a station to its first one."""
    for pending, reached in arriving:
        pending.wait()
        for to, what in reached.added:
            arrivals[to] += arrivals[what]
    arriving.clear()
