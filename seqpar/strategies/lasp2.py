"""LASP-2: ranks exchange states of linear attention, once forward and once backward.

Sun et al., "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid" (2025),
algorithms 1 to 4. Each rank computes the states of its tokens, and posts them. While they travel,
it computes what its tokens get from each other, and then adds what they get from earlier tokens
(`seqpar.linear.strategy`). Here the states are those of spans, so any layout works, and each rank
is sent just what its spans need: for contiguous and zigzag layouts at most one state of a document
from every other rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm, Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import shown
from seqpar.core.traffic import Traffic
from seqpar.linear.states.call import ResolvedCall
from seqpar.linear.states.gather import Gathering
from seqpar.linear.states.module import LinearAttention
from seqpar.linear.states.strategy import LinearStrategy, StateExchange
from seqpar.strategies.registry import register
from seqpar.strategies.zeco import ZeCO


@dataclass(frozen=True)
class LASP2(LinearStrategy):
    """States are sent to all ranks that need them, at once."""

    name = "lasp2"
    transport = "all_gather"

    def exchange(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
    ) -> StateExchange:
        return GatheredStates(comm, call, device, backward)

    def states_traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        rows = []
        for direction in ("forward", "backward"):
            for peer in range(call.routes.ranks):
                if peer != rank:
                    route = call.routes.route(rank, peer, backward=direction == "backward")
                    total = len(route.stations) * call.state_bytes
                    rows.append(Traffic(direction, 0, peer, 1, total))
        return rows


TRANSPORTS = (LASP2.transport, ZeCO.transport)


class GatheredStates:
    """The sums of states at a rank's stations, while all ranks send each other what they need."""

    def __init__(
        self, comm: Comm, call: ResolvedCall, device: torch.device, backward: bool
    ) -> None:
        rank, routes, shape = comm.rank, call.routes, call.shape
        self._comm, self._label = comm, f"lasp2 {'backward' if backward else 'forward'}"
        self._plan = call.once(
            ("gathering", backward, device),
            lambda: Gathering(routes, rank, backward, shape, device),
        )
        options, plan = call.options, self._plan
        weighed = options.derived(plan, lambda: plan.weigh(options))
        self._compose, self._arrive, *self._earlier = weighed
        self.travels = self._plan.travels

    def post(self, states: Tensor) -> None:
        plan, composed = self._plan, self._compose(states)
        self._arriving = states.new_empty((plan.arrivals, *states.shape[1:]))
        parts = composed.split_with_sizes(plan.sizes)
        places = self._arriving.split_with_sizes(plan.arriving)
        sends = [(peer, parts[part]) for peer, part in plan.sent]
        recvs = [(peer, places[peer]) for peer in plan.senders]
        self._pending = self._comm.exchange(sends, recvs, label=self._label)
        places[self._comm.rank].copy_(parts[plan.own])

    def wait(self) -> Tensor:
        self._pending.wait()
        sums = self._arrive(self._arriving)  # in the order of the ranks
        del self._arriving
        for add in self._earlier:
            sums = add(sums)
        return sums


@register
class LASP2Attention(LinearAttention):
    """Linear attention whose states are sent; see `LinearAttention` for the call.

    A state has S = B·Hkv·D·Dv·4 bytes (8 for 4 in fp64), whatever the length of the document.

    `transport="all_gather"`: every rank sends every other rank the states that its tokens need, in
    one exchange, posted before the work within spans and hidden under it. In forward rank r sends a
    rank S for each of that rank's spans before which r has tokens of the same document, if these
    come after that rank's previous span. So for a contiguous document it sends each later rank at
    most S, and for a zigzag document each rank at most S. Backward sends as much, the other way
    round. With `return_state`, backward starts with the gradients of the final states, which all
    ranks have: r also sends S to each rank that has tokens of a document if none of r's follow the
    last of them.

    `transport="scan"` (ZeCO's All-Scan): states pass from span to span, in `blocks` blocks. A rank
    sends one S for each of its spans that another rank's span follows, however many ranks there
    are, in P − 1 steps instead of one (without `causal` two S for each of its documents, in
    2 (P − 1) steps). With `return_state`, each rank in backward also sends S to the holder of each
    document's last token.

    With `return_state`, the holder of a document's last token in forward also sends S to all other
    ranks, in an exchange of its own (step 1 in traffic and traces) hidden under the last work of
    the pass, so that all ranks have the same bits.

    Args:
        group: a process group or a 1-D DeviceMesh.
        transport: "all_gather" or "scan".
        blocks: in how many blocks of equal size a state is passed on by "scan", at most: the most
            that B·Hkv·D is divisible by.
        check_ranks: compare a digest of each call over the ranks first (32 bytes to each peer), so
            that ranks that disagree all raise the same ValueError instead of hanging.
        routing: how messages between nodes are sent over several NICs at once; None: straight, as
            "scan" needs it.

    Sun et al., "LASP-2" (2025), algorithms 1 to 4; "ZeCO" (2025), section 3.
    """

    strategy = LASP2

    def __init__(
        self,
        group: Group,
        transport: str = "all_gather",
        blocks: int = 4,
        check_ranks: bool = False,
        *,
        routing: Routing | None = None,
    ) -> None:
        if not isinstance(transport, str) or transport not in TRANSPORTS:
            expected = f"one of {', '.join(TRANSPORTS)}"
            raise ValueError(f"transport must be {expected}, got {shown(transport)}")
        scan = ZeCO(blocks)
        super().__init__(scan if transport == "scan" else LASP2(), group, 1, check_ranks, routing)
        self.transport = transport

    def extra_repr(self) -> str:
        """Return what the module's representation says beside its name."""
        return f"{super().extra_repr()}, transport={self.transport!r}"
