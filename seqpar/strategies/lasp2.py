"""LASP-2: linear attention for which ranks exchange states, once in forward and once in backward.

A *span* is a range of consecutive tokens of a document on one rank. The *state* of a span is a
matrix (D, Dv) for each KV head: the sum of the outer products k vᵀ of the span's tokens. The loop
`lasp2` of docs/internals/in_300_lines.md shows the idea. Unlike the loop, this strategy has decay,
packed documents in any layout, and a backward.

The method is from Sun et al., "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its
Hybrid" (2025), algorithms 1 to 4. Unlike the paper, this strategy has a separate state for each
span, so that any layout works. A rank receives only the states that its spans need.
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
    """The strategy that sends each state to all ranks that need it, in a single exchange."""

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
    """The exchange of states in one forward or one backward.

    A *state* is a matrix for each head, which summarises tokens of a document. `post` sends the
    states of this rank to the ranks that need them. `wait` returns the sums that this rank needs. A
    sum is over the states of all earlier tokens of a document.
    """

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
        # Adds the states of all ranks in the order of the ranks.
        sums = self._arrive(self._arriving)
        del self._arriving
        for add in self._earlier:
            sums = add(sums)
        return sums


@register
class LASP2Attention(LinearModule):
    """Linear attention over a packed batch whose tokens are distributed over the ranks of a group.

    Within each document

        out_i = scale · Σ_{j≤i} λ^{i−j} (q_i·k_j) v_j

    where λ = exp(log_decay) is a constant for each KV head. A *span* is a range of consecutive
    tokens of a document on one rank. The *state* of some tokens is the matrix Σ λ^{…} k_j v_jᵀ for
    each KV head. Its size does not depend on the number of tokens. It has S = B·Hkv·D·Dv·e bytes,
    where e is 4 (8 for fp64).

    A layout is refused if it has so many short spans that sending states would take more bytes than
    sending keys and values. This is the case if a rank has more than 4 spans of a document, and
    these spans have on average fewer than D·Dv·e / ((D + Dv)·b) tokens, where b is the number of
    bytes of an element of q.

    For backward, forward keeps q, k, v, and a state for each span that does not begin its document.
    With `initial_state`, a state is kept for each span. With `causal=False`, a state is kept for
    each document of which the rank has tokens.

    `transport="all_gather"`: ranks send states in one exchange. The exchange is posted before a
    rank computes with its own tokens, and this computation hides the exchange. In forward, rank r
    sends S bytes to rank p for each span of p, if r has tokens of the document between p's previous
    span and this span. For each document, r sends at most S bytes to each later rank with a
    contiguous layout, and at most S bytes to each other rank with a zigzag layout. Backward sends
    as many bytes as forward, in the other direction.

    `transport="scan"` (ZeCO's All-Scan): a sum of states is sent from span to span, and each rank
    adds the state of its span. The sum is cut into `blocks` blocks, so that several links work at
    the same time. A rank sends S bytes for each of its spans after which the document continues on
    another rank, for any number of ranks. The transport takes P − 1 steps. With `causal=False`, a
    rank sends 2·S bytes for each of its documents, in 2 (P − 1) steps.

    With `return_state`, the rank that holds the last token of a document also sends the final
    state, of S bytes, to all other ranks in forward, so that all ranks have the same bits. Final
    states are sent in a separate exchange, which is step 1 in traffic and traces. The last
    computation of forward hides this exchange. In backward, all ranks have gradients of the final
    states. With "all_gather", rank r also sends S bytes to each rank p that has tokens of a
    document, if r has no tokens of the document after p's last token. With "scan", each rank also
    sends S bytes to the rank that holds the last token of each document.

    Args:
        group: a process group or a 1-D DeviceMesh. All ranks must make the calls on a group in the
            same order. If several threads call at the same time, each needs a separate group.
        transport: "all_gather" or "scan".
        blocks: the largest number of blocks into which "scan" cuts a state. Blocks have equal
            sizes, so the number of blocks divides B·Hkv·D.
        check_ranks: whether to compare a digest of each call between ranks first, in ⌈log₂ P⌉
            messages of 64 bytes. If ranks make different calls, all ranks then raise the same
            ValueError, and no rank hangs.
        routing: how to send messages between nodes over several NICs at the same time. With None,
            messages are sent directly. "scan" requires None.

    The method is from Sun et al., "LASP-2" (2025), algorithms 1 to 4, and "ZeCO" (2025), section 3.
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
        """Compute linear attention of this rank's queries over the keys of all ranks, within
        documents.

        Gradients are derivatives of the sum of the losses of all ranks. Autocast casts q, k and v
        as for SDPA.

        Args:
            q: (T_local, Hq, D) or (B, T_local, Hq, D), in the layout's local order; fp64, fp32,
                bf16 or fp16. If q is a DTensor, all tensors must be DTensors on the same mesh. They
                may be sharded only along heads, with equal numbers of heads on all ranks. The
                results are DTensors if q is a DTensor.
            k: (T_local, Hkv, D), with a leading batch dimension if q has one. Hq must be a multiple
                of Hkv.
            v: (T_local, Hkv, Dv), with a leading batch dimension if q has one.
            layout: the tokens of the packed batch that each rank holds.
            causal: with False, each query attends to all keys of its document, without decay.
            log_decay: (Hkv,), fp32 or fp64, on q's device or the CPU. log λ, which is at most 0,
                and must be the same on all ranks. It has no gradient. If it is on a GPU, checking
                its values synchronises host and device once, and again after it is changed.
            scale: the factor of q·k, as a number or a tensor. A tensor () that requires a gradient,
                or a tensor (Hq,) with one scale per head, is multiplied with q, and the product is
                rounded to q's dtype. Its gradient is summed over this rank's queries.
            initial_state: (documents, Hkv, D, Dv), with a leading batch dimension if q has one, in
                fp32 (fp64 for fp64), on q's device. The state with which each document begins. It
                must be the same on all ranks. Its gradient on a rank comes only from this rank's
                outputs. Sum it over ranks, as for a parameter.
            return_state: whether to return the final states of documents, which have the same bits
                on all ranks.
            others: refused. For argument names of fla, the TypeError names the argument to use
                instead.

        Returns:
            out (T_local, Hq, Dv), with a leading batch dimension if q has one, in q's dtype. With
            `return_state`, (out, state), where the state is like `initial_state`. Both are
            differentiable.

        Raises:
            ValueError: if the call is wrong or cannot be computed exactly. The message names the
                argument, and nothing was sent.
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
