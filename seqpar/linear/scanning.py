"""Pass states on from span to span, round by round, beside the rank's computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.linear.beside import run_beside
from seqpar.linear.rounds import Round, Rounds


class ScannedStates:
    """The sums of states at a rank's stations, while states are passed on.

    A thread passes them on, or on a GPU a stream, so that the rank computes while states that it
    must pass on have not arrived yet. What a sum becomes on its way is a subclass's.
    """

    def __init__(self, comm: Comm, plan: Rounds, label: str) -> None:
        self._comm, self._plan, self._label = comm, plan, label
        self.travels = plan.travels

    def _carry(self, number: int, message: Tensor, carried: Tensor) -> None:
        """Add to the links of a message what they carry on, given what has arrived for them."""
        raise NotImplementedError

    def _begin(self, states: Tensor, used: Sequence[Tensor]) -> None:
        """Begin to pass on states, whose last dimension is that of rows.

        `used` are the tensors that `_carry` reads.
        """
        self._states = states
        self._sums = states.new_empty((self._plan.stations, *states.shape[1:]))
        self._join: Callable[[], None] | None = None
        if self.travels:
            self._join = run_beside(self._run, states, self._sums, *used)
        else:
            self._run()

    def wait(self) -> Tensor:
        """Return the sums, like the states, by slot."""
        if self._join is not None:
            self._join()
        return self._sums

    def _run(self) -> None:
        """Take all hops to and from this rank, round by round (`seqpar.linear.rounds`)."""
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
            if now.reaches:
                arriving.append((pending, now))
            else:
                sent.append(pending)
        _arrive(arriving, arrivals)
        sums = self._sums.view(len(plan.sums), *shape)
        torch.index_select(arrivals, 0, plan.sums, out=sums)
        for pending in sent:
            pending.wait()


def _arrive(arriving: list[tuple[Pending, Round]], arrivals: Tensor) -> None:
    """Wait for what is arriving, and add what reaches a station after something else has."""
    for pending, reached in arriving:
        pending.wait()
        for to, what in reached.added:
            arrivals[to] += arrivals[what]
    arriving.clear()
