"""Exchange the final state of each document, and the gradients of final states.

The final state of a document is a matrix for each head, which summarises all tokens of the
document. One rank computes the final state and sends it to all ranks, so that it has the same bits
on all ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.core.device_tables import TableHolder
from seqpar.core.traffic import Traffic
from seqpar.linear.linear_call import LinearCall
from seqpar.linear.routes import StateRoutes
from seqpar.linear.scanning import as_table

# the step of these exchanges in traffic and traces; exchanges of entering states have step 0
STEP = 1


class FinalStates:
    """The exchange that sends the final state of each document to all ranks.

    `own` (ended, B, H, K, V) has the final states of the documents whose last token is on this
    rank.
    """

    def __init__(self, comm: Comm, call: LinearCall, own: Tensor, strategy: str) -> None:
        self._plan = arrival_order(call, own.device)
        self._states = own.new_empty((self._plan.states, *own.shape[1:]))
        self._states[self._plan.own] = own
        received = [(peer, self._states[part]) for peer, part in self._plan.received]
        sent = [(peer, own) for peer in comm.peers]
        self._pending = comm.exchange(sent, received, label=f"{strategy} forward", step=STEP)

    def wait(self, initial: Tensor | None) -> Tensor:
        """Return all final states, (documents, B, H, K, V).

        The final state of a document without tokens is its initial state, or 0.
        """
        plan = self._plan
        if plan.empty is not None:
            at_end = self._states[plan.at_end]
            at_end.zero_() if initial is None else at_end.copy_(initial[plan.empty])
        self._pending.wait()
        return self._states if plan.order is None else self._states[plan.order]


class ArrivalOrder(TableHolder):
    """The order in which final states arrive: sorted by the rank that sends them.

    The states of documents without tokens, which no rank sends, come last.
    """

    def __init__(self, routes: StateRoutes, rank: int) -> None:
        ranks = range(routes.ranks)
        ended = [routes.ended(peer) for peer in ranks]
        stops = np.cumsum([x.size for x in ended]).tolist()
        parts = [slice(stop - x.size, stop) for x, stop in zip(ended, stops, strict=True)]
        self.own = parts[rank]  # the states that this rank sends
        self.received = [(p, parts[p]) for p in ranks if p != rank and ended[p].size]
        self.states = routes.lengths.size
        empty = np.flatnonzero(routes.lengths == 0)  # the documents without tokens
        self.empty = as_table(empty) if empty.size else None
        # The slots of the states of documents without tokens.
        self.at_end = slice(self.states - empty.size, self.states)
        order = np.argsort(np.concatenate([*ended, empty]), kind="stable")
        # The slot of the state of each document. None if states arrive in the order of the
        # documents.
        in_order = np.array_equal(order, np.arange(order.size))
        self.order = None if in_order else as_table(order)


def arrival_order(call: LinearCall, device: torch.device) -> ArrivalOrder:
    routes, rank = call.routes, call.rank
    return call.once_on(device, ("final states",), lambda: ArrivalOrder(routes, rank))


def ended_documents(call: LinearCall, device: torch.device) -> list[Tensor]:
    routes = call.routes
    build = lambda: [as_table(routes.ended(rank)) for rank in range(routes.ranks)]  # noqa: E731
    return call.once_on(device, ("final gradients",), build)


def final_states_traffic(call: LinearCall, rank: int, gradients: bool) -> list[Traffic]:
    """Return the messages of a rank for final states and, with `gradients`, for their gradients."""
    ended = [call.routes.ended(peer).size * call.state_bytes for peer in range(call.routes.ranks)]
    peers = [peer for peer in range(call.routes.ranks) if peer != rank]
    rows = [Traffic("forward", STEP, peer, 1, ended[rank]) for peer in peers]
    if gradients:
        rows += [Traffic("backward", STEP, peer, 1, ended[peer]) for peer in peers]
    return rows


class FinalGradients:
    """The exchange that sums the gradients of each document's final state over all ranks.

    `own` (documents, B, H, K, V) has this rank's gradients for all documents. The rank with the
    last token of a document gets the sum.
    """

    def __init__(self, comm: Comm, call: LinearCall, own: Tensor, strategy: str) -> None:
        ended = ended_documents(call, own.device)
        self._own = own.index_select(0, ended[comm.rank])
        arriving = (0, *own.shape) if not len(self._own) else (len(comm.peers), *self._own.shape)
        self._arriving = own.new_empty(arriving)
        sends = [(peer, own.index_select(0, ended[peer])) for peer in comm.peers]
        recvs = list(zip(comm.peers, self._arriving, strict=False))
        self._pending = comm.exchange(sends, recvs, label=f"{strategy} backward", step=STEP)
        self._rank = comm.rank

    def wait(self) -> Tensor:
        """Return the sums for documents whose last token is on this rank, (ended, B, H, K, V)."""
        self._pending.wait()
        parts = [*self._arriving]
        parts.insert(self._rank, self._own)
        total = parts[0].clone()
        for part in parts[1:]:  # adds in the order of the ranks
            total += part
        return total
