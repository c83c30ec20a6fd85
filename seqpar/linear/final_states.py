"""Documents' final states, which every rank returns: one rank has each, and sends it to all others.

Ranks that decode from replicas of a state must not differ in its last bits, so it is summed once.
"""

from __future__ import annotations

from torch import Tensor

from seqpar.comm.exchange import Comm
from seqpar.linear.call import ResolvedCall
from seqpar.traffic import Traffic

_STEP = 1  # after that of the states which enter spans, whatever the transport


class FinalStates:
    """The final states of all documents, while ranks send each other theirs.

    `own` (ended, B, Hkv, D, Dv) are those of the documents whose last tokens this rank holds.
    """

    def __init__(self, comm: Comm, call: ResolvedCall, own: Tensor, strategy: str) -> None:
        self._routes, self._own = call.routes, own
        returning = range(comm.size) if call.routes.returns_final_state else ()
        self._arriving = {
            rank: own.new_empty((call.routes.ended(rank).size, *own.shape[1:]))
            for rank in returning
            if rank != comm.rank
        }
        self._pending = comm.exchange(
            [(peer, own) for peer in self._arriving],
            list(self._arriving.items()),
            label=f"{strategy} forward",
            step=_STEP,
        )
        self._arriving |= {comm.rank: own}

    def wait(self, initial: Tensor | None) -> Tensor:
        """Return the states, (documents, B, Hkv, D, Dv), or (0, …) if they are not returned.

        A document without tokens ends as it began, with its initial state or 0.
        """
        count = self._routes.lengths.size * self._routes.returns_final_state
        states = self._own.new_zeros((count, *self._own.shape[1:]))
        if initial is not None:
            states.copy_(initial[:count])
        self._pending.wait()
        for rank, arrived in self._arriving.items():
            states[self._routes.ended(rank)] = arrived
        return states


def final_states_traffic(call: ResolvedCall, rank: int) -> list[Traffic]:
    """Return what a rank sends for the final states."""
    total = call.routes.ended(rank).size * call.state_bytes
    peers = [peer for peer in range(call.routes.ranks) if peer != rank]
    return [Traffic("forward", _STEP, peer, 1, total) for peer in peers]
