"""The module of recurrent attention: the call that all of its transports share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

import seqpar.linear.maps.flops  # noqa: F401  defines torch.ops.seqpar.recurrent_attention too
from seqpar.attention.module import BoundModule, Moving
from seqpar.attention.operands import fold_scale, prepare_operands
from seqpar.comm.dtensor import HeadPlacement, local_heads
from seqpar.layout.layout import Layout
from seqpar.linear.call import batch_second, returned
from seqpar.linear.inputs import Inputs
from seqpar.linear.kinds import Kind
from seqpar.linear.maps.call import STATE_DIMS, CallArguments, resolve
from seqpar.linear.maps.decode import decode_step
from seqpar.linear.maps.strategy import RecurrentStrategy

OperatorTensors = tuple[Tensor | None, ...]


class RecurrentModule(BoundModule[Moving]):
    """Recurrent attention over a packed batch whose tokens are spread over the ranks of a group.

    Within each document, with a state S (K, V) for each of H = max(Hk, Hv) heads,

        S̄ₜ = diag(exp gₜ) Sₜ₋₁
        Sₜ = S̄ₜ + kₜ vₜᵀ, or by the delta rule S̄ₜ + βₜ kₜ (vₜ − S̄ₜᵀ kₜ)ᵀ
        outₜ = scale · Sₜᵀ qₜ

    where g is `log_decay`. The kind says what g and β are:

    | kind | `log_decay` | `beta` | as in |
    |---|---|---|---|
    | "linear" | | | linear attention |
    | "constant_decay" | (H,) | | RetNet, Lightning Attention, MiniMax |
    | "scalar_decay" | (T_local, H) | | Mamba-2, simple GLA |
    | "vector_decay" | (T_local, H, K) | | GLA |
    | "delta" | | (T_local, H) | DeltaNet |
    | "gated_delta" | (T_local, H) | (T_local, H) | Gated DeltaNet: Qwen3-Next, Qwen3.5 |
    | "kda" | (T_local, H, K) | (T_local, H) | Kimi Linear |

    It takes any layout, so it can share that of softmax layers. It refuses only layouts whose maps
    outweigh their tokens: those with more than 4 spans of a document on a rank, of less than
    e·4 / ((K + V)·b) tokens on average (b is the bytes of an element of q; for fp64, 8 instead of
    4). e is how many numbers a head's map has: K·V and, for a decay of each head 1, of each key
    channel K, for the delta rule K².

    Kept for backward: the inputs, and a state for each span that does not begin its document (with
    `initial_state` for each span).
    """

    strategy: ClassVar[type[RecurrentStrategy]]
    kind: Kind

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        scale: float | Tensor = 1.0,
        initial_state: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute recurrent attention of this rank's queries over the tokens of all ranks.

        The gradients are those of the sum of all ranks' losses. Under autocast q, k and v are cast
        as SDPA's are. Keys are taken as they are: models whose keys have length 1 normalise them
        before.

        Args:
            q: (T_local, Hq, K) or (B, T_local, Hq, K), in the layout's local order; fp64, fp32,
                bf16 or fp16. If it is a DTensor, all tensors are, with at most their heads sharded,
                evenly, over one mesh; so are the results.
            k: (T_local, Hk, K) or with the batch in front, likewise.
            v: (T_local, Hv, V), likewise. Of Hk and Hv one is a multiple of the other, H is the
                larger, and Hq divides it or is a multiple of it. Where there are fewer of one than
                of another, each serves as many consecutive ones.
            log_decay: at most 0, as the table says; of tokens with the batch in front where q has
                one. Any float dtype: fp32 where decays are close to 1. Values are not checked. A
                constant one is the same on all ranks, and has no gradient.
            beta: as the table says, likewise.
            scale: what q·k is multiplied by. A tensor () that requires a gradient, or (Hq,), one
                scale a head, multiplies q, and the product is rounded to q's dtype. Its gradient is
                summed over this rank's queries.
            initial_state: (documents, H, K, V), or with the batch in front, fp32 (fp64 for fp64),
                on q's device, the same on all ranks: the state with which each document begins.
                The sum over ranks is its gradient, as a parameter's; a rank has that of the
                documents whose first token it holds.
            return_state: also return the documents' final states, the same bits on every rank.

        Returns:
            out (T_local, max(Hq, H), V), or with the batch in front, in q's dtype; or (out, state),
            both differentiable, with the state like `initial_state`.

        Raises:
            ValueError: if the call is wrong or cannot be computed exactly. It names the argument,
                and is raised before anything is sent.
        """
        tensors, arguments, heads = self._agreed_inputs(
            q,
            k,
            v,
            layout,
            log_decay=log_decay,
            beta=beta,
            scale=scale,
            initial_state=initial_state,
            return_state=return_state,
        )
        out, states, *_ = self._run(tensors, arguments)
        return returned(out, states if arguments.return_state else None, q.dim() == 4, heads)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        *,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        scale: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Go on with one or t tokens of each of N documents: return out and the next state.

        It is plain PyTorch, and nothing is sent. q, k and v are (N, heads, dim) or (N, t, heads,
        dim), the gates likewise, and the state (N, H, K, V) is what a call or a step before
        returned. See `seqpar.linear.maps.decode.decode_step`, which has the errors.
        """
        gates = {"log_decay": log_decay, "beta": beta}
        return decode_step(self.kind.name, q, k, v, state, **gates, scale=scale)

    def _run(self, tensors: Any, arguments: Any) -> list[Tensor]:
        """Call the operator."""
        results: list[Tensor] = torch.ops.seqpar.recurrent_attention(*tensors, *arguments)
        return results

    def _to_call(self, tensors: Any, arguments: Any) -> Any:
        *inputs, initial = tensors
        return resolve(self._bound.comm, self.kind, arguments, Inputs(*inputs), initial)

    def _operator_inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        scale: float | Tensor = 1.0,
        initial_state: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Any, Any, HeadPlacement]:
        """Return the operator's tensors (the inputs, initial states), and what the base says."""
        of_decay = {"head": -1, "key": -2}.get(self.kind.decay or "", 0)
        tensors = {"q": (q, -2), "k": (k, -2), "v": (v, -2), "log_decay": (log_decay, of_decay)}
        others = {"beta": (beta, -1), "initial_state": (initial_state, -3), "scale": (scale, 0)}
        local, heads = local_heads({**tensors, **others})
        q, k, v, log_decay, beta, initial_state, scale = local
        q, scale = fold_scale("scale", q, scale) if isinstance(q, Tensor) else (q, scale)
        batched = isinstance(q, Tensor) and q.dim() == 4
        q, k, v = prepare_operands(
            q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state
        )
        arguments = CallArguments.of(
            self._key,
            self.rank,
            layout,
            scale=scale,
            has_initial_state=initial_state is not None,
            return_state=return_state,
        )
        if self.kind.decay == "constant":
            if log_decay is not None and log_decay.requires_grad and torch.is_grad_enabled():
                raise ValueError("log_decay must not require a gradient: a constant one has none")
        elif log_decay is not None and not batched:
            log_decay = log_decay[None]
        if beta is not None and not batched:
            beta = beta[None]
        if initial_state is not None:
            initial_state = batch_second(initial_state, batched, STATE_DIMS)
        return (q, k, v, log_decay, beta, initial_state), arguments, heads
