"""The module of linear attention: what all strategies' modules share."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

import seqpar.linear.states.flops
import seqpar.linear.states.operator  # noqa: F401  defines torch.ops.seqpar.linear_attention
from seqpar.attention.module import BoundModule
from seqpar.attention.operands import fold_scale, prepare_operands
from seqpar.attention.operators import refuse_tangents
from seqpar.comm.dtensor import HeadPlacement, local_heads
from seqpar.core.arguments import check_tensor
from seqpar.layout.layout import Layout
from seqpar.linear.call import batch_second, returned
from seqpar.linear.states.call import STATE_DIMS, CallArguments, ResolvedCall, resolve
from seqpar.linear.states.decode import decode_step
from seqpar.linear.states.strategy import LinearStrategy

OperatorTensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


class LinearAttention(BoundModule[LinearStrategy]):
    """Linear attention over a packed batch whose tokens are spread over the ranks of a group.

    out_i = scale · Σ_{j≤i} λ^{i−j} (q_i·k_j) v_j within each document, where λ = exp(log_decay) is
    a constant for each KV head. It takes any layout, so it can share that of softmax layers. It
    refuses only layouts whose states outweigh their tokens: those with more than 4 spans of a
    document on a rank, of less than D·Dv·4 / ((D + Dv)·b) tokens on average (b is the bytes of an
    element of q; for fp64, 8 instead of 4).

    Kept for backward: q, k, v, and a state for each span that does not begin its document (with
    `initial_state` for each span; without `causal` for each document of which the rank has tokens).
    """

    strategy: ClassVar[type[LinearStrategy]]

    step = staticmethod(decode_step)

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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute linear attention of this rank's queries over the keys of all ranks, by document.

        The gradients are those of the sum of all ranks' losses. Under autocast q, k and v are cast
        as SDPA's are.

        Args:
            q: (T_local, Hq, D) or (B, T_local, Hq, D), in the layout's local order; fp64, fp32,
                bf16 or fp16. If it is a DTensor, all tensors are, with at most their heads sharded,
                evenly, over one mesh; so are the results.
            k: (T_local, Hkv, D) or with the batch in front; Hq must be a multiple of Hkv.
            v: (T_local, Hkv, Dv), likewise.
            layout: which tokens of the packed batch each rank holds.
            causal: without it each query sees all keys of its document, and there is no decay.
            log_decay: (Hkv,) fp32 or fp64, at most 0, on q's device or the CPU, the same on all
                ranks: log λ. It has no gradient. To check it costs a synchronisation if it is on a
                GPU, once for a tensor until it is written to.
            scale: what q·k is multiplied by. A tensor () that requires a gradient, or (Hq,), one
                scale a head, multiplies q, and the product is rounded to q's dtype. Its gradient is
                summed over this rank's queries.
            initial_state: (documents, Hkv, D, Dv), or with the batch in front, fp32 (fp64 for
                fp64), on q's device, the same on all ranks: the state with which each document
                begins. Its gradient is that through this rank's outputs alone: sum it over ranks,
                as a parameter's.
            return_state: also return the documents' final states, the same bits on every rank.

        Returns:
            out (T_local, Hq, Dv), or with the batch in front, in q's dtype; or (out, state), both
            differentiable, with the state like `initial_state`.

        Raises:
            ValueError: if the call is wrong or cannot be computed exactly. It names the argument,
                and is raised before anything is sent.
        """
        tensors, arguments, heads = self._agreed_inputs(
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
        out, states, *_ = torch.ops.seqpar.linear_attention(*tensors, *arguments)
        return returned(out, states if arguments.return_state else None, q.dim() == 4, heads)

    def _to_call(self, tensors: OperatorTensors, arguments: CallArguments) -> ResolvedCall:
        return resolve(self._bound.comm, arguments, *tensors)

    def _operator_inputs(
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
    ) -> tuple[OperatorTensors, CallArguments, HeadPlacement]:
        """Return the operator's tensors (q, k, v, log_decay, initial), and what the base says."""
        tensors = {"q": (q, -2), "k": (k, -2), "v": (v, -2), "log_decay": (log_decay, 0)}
        others = {"initial_state": (initial_state, -3), "scale": (scale, 0)}
        (q, k, v, log_decay, initial_state, scale), heads = local_heads({**tensors, **others})
        check_tensor("q", q)
        q, scale = fold_scale("scale", q, scale)
        batched = q.dim() == 4
        q, k, v = prepare_operands(q, k, v, initial_state=initial_state)
        arguments = CallArguments.of(
            self._key,
            self.rank,
            layout,
            causal=causal,
            scale=scale,
            has_initial_state=initial_state is not None,
            return_state=return_state,
        )
        if log_decay is not None:  # another device would mislead the operator's dispatch
            check_tensor("log_decay", log_decay, q.device, or_cpu=True)
            if log_decay.requires_grad and torch.is_grad_enabled():
                raise ValueError("log_decay must not require a gradient: it has none")
        refuse_tangents(log_decay=log_decay, initial_state=initial_state)
        if initial_state is not None:
            initial_state = batch_second(initial_state, batched, STATE_DIMS)
        return (q, k, v, log_decay, initial_state), arguments, heads
