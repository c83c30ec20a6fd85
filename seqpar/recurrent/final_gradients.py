"""Gradients of documents' final states, which all ranks have: the holder of the last token adds up.

That is the reverse of what `seqpar.linear.final_states` does in forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.core.traffic import Traffic
from seqpar.linear.final_states import STEP
from seqpar.linear.routes import StateRoutes
from seqpar.linear.state_call import StateCall


class FinalGradients:
    """The sums of the gradients of final states that this rank needs, while they arrive.

    `own` (documents, B, H, K, V) are this rank's gradients.
    """

    def __init__(self, comm: Comm, call: StateCall, own: Tensor, strategy: str) -> None:
        device, routes = own.device, call.routes
        plan = call.once(("final gradients", device), lambda: _Plan(routes, device))
        self._own = own.index_select(0, plan.ended[comm.rank])
        arriving = (0, *own.shape) if not len(self._own) else (len(comm.peers), *self._own.shape)
        self._arriving = own.new_empty(arriving)
        sends = [(peer, own.index_select(0, plan.ended[peer])) for peer in comm.peers]
        recvs = list(zip(comm.peers, self._arriving, strict=False))
        label = f"{strategy} backward"
        self._pending = comm.exchange(sends, recvs, label=label, step=STEP)
        self._before = comm.rank

    def wait(self) -> Tensor:
        """Return the sums of the documents that end on this rank, (ended, B, H, K, V)."""
        self._pending.wait()
        parts = [*self._arriving]
        parts.insert(self._before, self._own)
        total = parts[0].clone()
        for part in parts[1:]:  # in the order of the ranks
            total += part
        return total


class _Plan:
    """Which documents end on each rank, on a device."""

    def __init__(self, routes: StateRoutes, device: torch.device) -> None:
        ended = [routes.ended(rank) for rank in range(routes.ranks)]
        self.ended = [torch.from_numpy(x).to(device) for x in ended]


def final_gradients_traffic(call: StateCall, rank: int) -> list[Traffic]:
    """Return what a rank sends for the gradients of final states."""
    return [
        Traffic("backward", STEP, peer, 1, call.routes.ended(peer).size * call.state_bytes)
        for peer in range(call.routes.ranks)
        if peer != rank
    ]
