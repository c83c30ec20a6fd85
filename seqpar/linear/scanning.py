"""Send states from span to span in rounds, while the rank computes.

A *span* is a range of consecutive tokens of a document on one rank. In a *round*, a rank posts all
its sends and receives as one exchange. States are cut into blocks. If a state has the depth d in
the order in which states are sent (`chains.py`), block b of the state is sent in round d + b. A
rank passes on only sums that arrived in earlier rounds, and all ranks process the rounds in the
same order. For these two reasons, no two ranks wait for each other.
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
    """Return the numbers as a slice if they are consecutive, and otherwise as a tensor."""
    if (np.diff(numbers) == 1).all():
        first = int(numbers[0]) if numbers.size else 0
        return slice(first, first + numbers.size)
    return as_table(numbers)


class Carrying(NamedTuple):
    """The sums of states that one outgoing message passes on to the next rank. These sums arrived
    at this rank before the message is sent.
    """

    message: int
    # The number of links, at the start of the message, that pass on a sum. None means all links.
    carriers: int | None
    carried: Index  # the indices of these sums among the arrivals


class Round(NamedTuple):
    """The operations of a rank in one round, in which it posts its messages as one exchange.

    The fields are in the order of the operations. States are cut into blocks. Outgoing messages,
    and also incoming messages, are numbered block by block: all messages with the first block of
    states come before all messages with the second block, and so on.
    """

    number: int
    carrying: list[Carrying]  # the sums that the messages of this round pass on
    # (number of the outgoing message, number of the incoming message), of hops from this rank to
    # itself.
    kept: list[tuple[int, int]]
    sends: list[tuple[int, int]]  # (rank, number of the outgoing message), of hops to other ranks
    recvs: list[tuple[int, int]]  # (rank, number of the incoming message), of hops from other ranks
    # (first, later): arrivals at the same station. The later ones are added to the first.
    added: list[tuple[Index, Index]]


class Rounds(TableHolder):
    """All rounds of one rank in one pass. In a *round*, the rank posts some messages as one
    exchange.

    A state has `rows` rows, which are cut into `blocks` blocks of equal size. `sources` is the
    number of positions at which the rank has a state. `stations` is the number of positions at
    which the rank needs a sum of states.
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
        # The number of links in each outgoing message, and of arrivals in each incoming message. If
        # nothing arrives at some station, there is one more arrival, which consists of zeros.
        leaving = [hop for hop in hops if hop.source == rank]
        self.leaving = [hop.rows.size for hop in leaving] * blocks
        reaching = [hop for hop in hops if hop.target == rank]
        self.reaching = [hop.rows.size for hop in reaching] * blocks
        self.travels = any(hop.source != hop.target for hop in hops)

        # (links,): the block of a state with which each link begins. For a link without a state,
        # this is the index after the last block, and `pads` is then True.
        states = joined([hop.own_states for hop in leaving])
        self.pads = bool((states < 0).any())
        of_blocks = states * blocks + np.arange(blocks)[:, None]
        of_blocks = np.where(states < 0, sources * blocks, of_blocks).ravel()
        self.states = as_table(of_blocks)

        reached = joined([hop.target_slots for hop in reaching])
        slots, first = np.unique(reached, return_index=True)
        at_station = slots < stations
        # The arrival that consists of zeros, unless set below.
        sums = np.full((stations, blocks), blocks * reached.size)
        self.reaching.append(int(at_station.sum() < stations))
        self.arrivals = sum(self.reaching)
        sums[slots[at_station]] = first[at_station, None] + np.arange(blocks) * reached.size
        # (stations · blocks,): the arrivals that are the sums at stations. All blocks of a station
        # are together, and stations are ordered by slot.
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
        self.rounds = list(rounds.values())  # only rounds in which the rank does something
        # For each message that passes on sums, the number of its links that pass on a sum; None
        # means all.
        self.carriers = {x.message: x.carriers for each in self.rounds for x in each.carrying}


def joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])


def start(aside: bool, run: Callable[[], None], *used: Tensor) -> Callable[[], None]:
    """Call `run`. Return a function that waits until `run` has returned.

    With `aside`, a thread calls `run`. On a GPU, this thread uses a separate stream. `used` are the
    tensors that `run` reads or writes.
    """
    if aside:
        return run_async(run, *used)
    run()
    return lambda: None


class ScannedStates:
    """An exchange that sends states from span to span. `wait` returns the sums that a rank needs.

    A *span* is a range of consecutive tokens of a document on one rank. If there are messages
    between ranks, a thread runs the exchange, so that the rank can compute meanwhile. On a GPU, the
    thread uses a separate stream. A subclass says how a sum changes from one span to the next.
    """

    def __init__(self, comm: Comm, plan: Rounds, label: str) -> None:
        self._comm, self._plan, self._label = comm, plan, label
        self.travels = plan.travels

    def _carry(self, number: int, message: Tensor, carried: Tensor) -> None:
        """Add sums that have arrived at this rank to states of an outgoing message, in place.

        `number` is the number of the outgoing message. `message` has the states to which sums are
        added, and `carried` has the sums.
        """
        raise NotImplementedError

    def _begin(self, states: Tensor, used: Sequence[Tensor]) -> None:
        """Begin to send `states`, whose second-to-last dimension is cut into blocks.

        `used` are the tensors that `_carry` reads.
        """
        self._states = states
        self._sums = states.new_empty((self._plan.stations, *states.shape[1:]))
        self._join = start(self.travels, self._run, states, self._sums, *used)

    def wait(self) -> Tensor:
        """Return the sums of states at the rank's stations, ordered by slot."""
        self._join()
        return self._sums

    def _run(self) -> None:
        plan = self._plan
        shape = plan.rows, self._states.shape[-1]
        states = self._states.reshape(len(self._states) * plan.blocks, *shape)
        if plan.pads:
            states = pad(states, (0, 0, 0, 0, 0, 1))  # appends a block of zeros
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
    for pending, reached in arriving:
        pending.wait()
        for to, what in reached.added:
            arrivals[to] += arrivals[what]
    arriving.clear()
