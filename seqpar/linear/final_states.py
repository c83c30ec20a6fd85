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
        routes = call.routes
        self._count = routes.lengths.size if routes.returns_final_state else 0
        self._documents = [routes.ended(rank) for rank in range(comm.size)]
        self._states = [own.new_empty((x.size, *own.shape[1:])) for x in self._documents]
        self._states[comm.rank] = own
        self._pending = comm.exchange(
            [(peer, own) for peer in comm.peers],
            [(peer, self._states[peer]) for peer in comm.peers],
            label=f"{strategy} forward",
            step=_STEP,
        )

    def wait(self, initial: Tensor | None) -> Tensor:
        """Return the states, (documents, B, Hkv, D, Dv), or (0, …) if they are not returned.

        A document without tokens ends as it began, with its initial state or 0.
        """
        own = self._states[0]
        states = own.new_zeros((self._count, *own.shape[1:]))
        if initial is not None:
            states.copy_(initial[: self._count])
        self._pending.wait()
        for documents, arrived in zip(self._documents, self._states, strict=True):
            states[documents] = arrived
        return states


def final_states_traffic(call: ResolvedCall, rank: int) -> list[Traffic]:
    """Return what a rank sends for the final states."""
    total = call.routes.ended(rank).size * call.state_bytes
    peers = [peer for peer in range(call.routes.ranks) if peer != rank]
    return [Traffic("forward", _STEP, peer, 1, total) for peer in peers]
