"""LASP-2: ranks exchange states of linear attention, once in forward and once in backward.

To the loop `lasp2` of docs/internals/in_300_lines.md, this strategy adds decay, packed documents in
any layout, and a backward pass.

Sun et al., "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid" (2025),
algorithms 1 to 4. States travel while ranks compute with their own tokens
(`seqpar.linear.states.state_strategy`). They belong to spans here, so any layout works, and a rank
gets only the states that its spans need: for contiguous and zigzag layouts, at most one state of a
document from every other rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm, Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import shown
from seqpar.core.traffic import Traffic
from seqpar.layout.layout import Layout
from seqpar.linear.decode import decode_linear_step
from seqpar.linear.linear_strategy import Exchange
from seqpar.linear.module import LinearModule
from seqpar.linear.states.state_strategy import StateCall, StateStrategy
from seqpar.linear.states.sums import Gathering
from seqpar.strategies.registry import register
from seqpar.strategies.zeco import ZeCO


@dataclass(frozen=True)
class LASP2(StateStrategy):
    """States are sent to all ranks that need them, at once."""

    name = "lasp2"
    transport = "all_gather"

    def exchange(
        self, comm: Comm, call: StateCall, device: torch.device, backward: bool
    ) -> Exchange[Tensor]:
        return GatheredStates(comm, call, device, backward)

    def exchange_traffic(self, call: StateCall, rank: int) -> list[Traffic]:
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

    def __init__(self, comm: Comm, call: StateCall, device: torch.device, backward: bool) -> None:
        rank, routes, shape = comm.rank, call.routes, call.shape
        self._comm, self._label = comm, f"lasp2 {'backward' if backward else 'forward'}"
        self._plan = call.once_on(
            device, ("gathering", backward), lambda: Gathering(routes, rank, backward, shape)
        )
        weighed = call.options.once(device, self._plan, self._plan.weigh)
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
class LASP2Attention(LinearModule):
    """Linear attention over a packed batch: ranks exchange the states of its documents.

    out_i = scale · Σ_{j≤i} λ^{i−j} (q_i·k_j) v_j within each document, where λ = exp(log_decay) is
    a constant for each KV head. It takes any layout, except those whose states outweigh their
    tokens: with more than 4 spans of a document on a rank, of less than D·Dv·4 / ((D + Dv)·b)
    tokens on average (b is the bytes of an element of q; for fp64, 8 instead of 4).

    Kept for backward: q, k, v, and a state for each span that does not begin its document. With
    `initial_state` that is a state for each span; with `causal=False`, one for each document of
    which the rank has tokens.

    A state has S = B·Hkv·D·Dv·4 bytes (8 for 4 in fp64), for documents of any length.

    `transport="all_gather"`: every rank sends every other rank the states that its tokens need, in
    one exchange, posted before the work within spans and hidden under it. In forward, rank r sends
    another rank S for each of that rank's spans, if r has tokens of the document between that span
    and the rank's previous one. So it sends each later rank at most S for a contiguous document,
    and each rank at most S for a zigzag document. Backward sends as much in the other direction.
    With `return_state`, backward starts with the gradients of the final states, which all ranks
    have: r also sends S to each rank that has tokens of a document if none of r's follow the last
    of them.

    `transport="scan"` (ZeCO's All-Scan): states pass from span to span, in `blocks` blocks. On any
    number of ranks, a rank sends one S for each of its spans that another rank's span follows, in
    P − 1 steps instead of one. With `causal=False` it sends two S for each of its documents, in
    2 (P − 1) steps. With `return_state`, each rank in backward also sends S to the holder of each
    document's last token.

    With `return_state`, the holder of a document's last token in forward also sends S to all other
    ranks, so that all ranks have the same bits. That is a separate exchange (step 1 in traffic and
    traces), hidden under the last work of the pass.

    Args:
        group: a process group or a 1-D DeviceMesh. Calls on a group have one order, the same on all
            ranks; threads that call at the same time need a group each.
        transport: "all_gather" or "scan".
        blocks: the most blocks into which "scan" cuts a state. They are equal in size, so it uses
            the largest number up to this that divides B·Hkv·D.
        check_ranks: compare a digest of each call over the ranks first, in ⌈log₂ P⌉ messages of 64
            bytes, so that ranks that disagree all raise the same ValueError instead of hanging.
        routing: how messages between nodes use several NICs at the same time; None sends each
            message directly, which "scan" needs.

    Sun et al., "LASP-2" (2025), algorithms 1 to 4; "ZeCO" (2025), section 3.
    """

    strategy = LASP2
    _decay = "constant"

    step = staticmethod(decode_linear_step)

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
        return f"{super().extra_repr()}, transport={self.transport!r}"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        causal: bool = True,
        log_decay: Tensor | None = None,
        scale: float | Tensor = 1.0,
        initial_state: Tensor | None = None,
        return_state: bool = False,
        **others: Never,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute linear attention of this rank's queries over the keys of all ranks, by document.

        Backward computes the gradients of the sum of all ranks' losses. Under autocast q, k and v
        are cast as in SDPA.

        Args:
            q: (T_local, Hq, D) or (B, T_local, Hq, D), in the layout's local order; fp64, fp32,
                bf16 or fp16. If it is a DTensor, all tensors are, with at most their heads sharded,
                evenly, over one mesh; so are the results.
            k: (T_local, Hkv, D) or with the batch in front; Hq must be a multiple of Hkv.
            v: (T_local, Hkv, Dv) or with the batch in front.
            layout: the tokens of the packed batch that each rank holds.
            causal: False lets each query attend to all keys of its document, without decay.
            log_decay: (Hkv,) fp32 or fp64, at most 0, on q's device or the CPU, the same on all
                ranks: log λ. It has no gradient. Checking it costs a synchronisation if it is on a
                GPU, once for a tensor until it is written to.
            scale: the factor of q·k. A tensor () that requires a gradient, or (Hq,), one scale per
                head, multiplies q, and the product is rounded to q's dtype. Its gradient is summed
                over this rank's queries.
            initial_state: (documents, Hkv, D, Dv), or with the batch in front, fp32 (fp64 for
                fp64), on q's device, the same on all ranks: the state with which each document
                begins. Its gradient here comes only through this rank's outputs: sum it over ranks,
                as a parameter's.
            return_state: also return the documents' final states, the same bits on every rank.
            others: refused; the TypeError names the argument to give instead, for names of fla.

        Returns:
            out (T_local, Hq, Dv), or with the batch in front, in q's dtype; or (out, state), both
            differentiable, with the state like `initial_state`.

        Raises:
            ValueError: the call is wrong or cannot be computed exactly. The message names the
                argument. Nothing has been sent.
        """
        if others:
            self._refuse_others(others, q, k, v)
        return self._attend(
            q,
            k,
            v,
            layout,
            causal=causal,
            log_decay=log_decay,
            scale=scale,
            initial_state=initial_state,
            return_state=return_state,
        )
