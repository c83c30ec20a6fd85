"""Recurrent attention: ranks exchange the maps of spans and compose them along each document.

To the loop `lasp2` of docs/internals/in_300_lines.md, this strategy adds that a span is summarised
by a map from the state that enters the span to the state that leaves it.
"""

from __future__ import annotations

from typing import Any, Never

from torch import Tensor

from seqpar.comm.dtensor import HeadPlacement
from seqpar.comm.messages.comm import Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import as_bool, shown
from seqpar.layout.layout import Layout
from seqpar.linear.decode import decode_step
from seqpar.linear.inputs import CallTensors, Inputs
from seqpar.linear.kinds import kind as kind_of
from seqpar.linear.linear_call import LinearArguments
from seqpar.linear.linear_strategy import LinearStrategy
from seqpar.linear.maps.gather import AllGather
from seqpar.linear.maps.map_strategy import MapStrategy
from seqpar.linear.maps.scan import Scan
from seqpar.linear.maps.tree import Tree
from seqpar.linear.module import LinearModule
from seqpar.strategies.lasp2 import LASP2
from seqpar.strategies.registry import register
from seqpar.strategies.zeco import ZeCO

TRANSPORTS = (AllGather.transport, Scan.transport, Tree.transport)


@register
class RecurrentAttention(LinearModule):
    """Recurrent attention over a packed batch: ranks exchange the maps of spans.

    Within each document, with a state S (K, V) for each of H = max(Hk, Hv) heads,

        S̄ₜ = diag(exp gₜ) Sₜ₋₁
        Sₜ = S̄ₜ + kₜ vₜᵀ, or by the delta rule S̄ₜ + βₜ kₜ (vₜ − S̄ₜᵀ kₜ)ᵀ
        outₜ = scale · Sₜᵀ qₜ

    where g is `log_decay`. The kind decides the shapes of g and β:

    | kind | `log_decay` | `beta` | as in |
    |---|---|---|---|
    | "linear" | | | linear attention |
    | "constant_decay" | (H,) | | RetNet, Lightning Attention, MiniMax |
    | "scalar_decay" | (T_local, H) | | Mamba-2, simple GLA |
    | "vector_decay" | (T_local, H, K) | | GLA |
    | "delta" | | (T_local, H) | DeltaNet |
    | "gated_delta" | (T_local, H) | (T_local, H) | Gated DeltaNet: Qwen3-Next, Qwen3.5 |
    | "kda" | (T_local, H, K) | (T_local, H) | Kimi Linear |

    It takes any layout, except those whose maps outweigh their tokens: with more than 4 spans of a
    document on a rank, of less than e·4 / ((K + V)·b) tokens on average (b is the bytes of an
    element of q; for fp64, 8 instead of 4). e is the number of elements of a head's map: K·V, plus
    1 for a decay per head, K for a decay per key channel, or K² for the delta rule.

    Kept for backward: the inputs, and a state for each span that does not begin its document (with
    `initial_state` for each span).

    A span's map (A, N) turns the state S that enters the span into A S + N. With numbers of 4 bytes
    (8 for fp64) a state has S = B·H·K·V·4 bytes and a map M = S + B·H·a·4, for documents of any
    length; a is 1 for a decay per head, K for a decay per key channel, and K² for the delta rule.
    Backward sends as much as forward, in the other direction.

    `transport="all_gather"`: in one exchange, posted before the work within spans and hidden under
    it, a rank sends every other rank the map of each of its spans before that rank's last one of
    the document: M, or S for a document's first span (in backward the last). So for a contiguous
    document it sends each later rank M. Each rank receives P maps and folds them one after another.
    That is the least work on few ranks, but on 256 ranks P·M are gigabytes.

    `transport="scan"`: states pass from span to span, in `blocks` blocks. On any number of ranks, a
    rank sends one S for each of its spans that another rank's span follows, in P − 1 steps instead
    of one. These are the fewest bytes: use it for slow links and few ranks.

    `transport="tree"`: recursive doubling. In step d of ⌈log₂ n⌉, for n spans of a document, the
    holder of span i sends M to the holder of span i + 2ᵈ, or S if i < 2ᵈ. For each of its spans a
    rank makes two compositions per step and holds about seven maps at most, on any number of ranks:
    use it for many ranks.

    The kinds "linear" and "constant_decay" send maps only with "tree". With "all_gather" and "scan"
    they use the exchanges of `LASP2Attention`, and the rules of its `log_decay` hold.

    With `return_state`, the holder of a document's last token in forward also sends S to all other
    ranks, in a separate exchange (step 1 in traffic and traces) hidden under the last work of the
    pass. Backward begins with the reverse: each rank sends its gradient of a final state, S, to
    that holder, hidden under the first work of the pass.

    Args:
        group: a process group or a 1-D DeviceMesh. Calls on a group have one order, the same on all
            ranks; threads that call at the same time need a group each.
        kind: "linear", "constant_decay", "scalar_decay", "vector_decay", "delta", "gated_delta" or
            "kda".
        transport: "all_gather", "scan" or "tree".
        check_ranks, routing: as in `LASP2Attention`; "scan" and "tree" need routing None.
        blocks: the most blocks into which "scan" cuts a state. A block is some whole heads, or some
            whole columns of a head, and all are equal in size.

    Sun et al., "LASP-2" (2025), algorithm 2; "ZeCO" (2025), section 3; Hillis and Steele, "Data
    parallel algorithms" (1986); Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over
    Sequence Length" (2018), section 2.
    """

    strategy = MapStrategy

    def __init__(
        self,
        group: Group,
        kind: str,
        transport: str = "all_gather",
        check_ranks: bool = False,
        *,
        blocks: int = 4,
        routing: Routing | None = None,
    ) -> None:
        recurrence, check_ranks = kind_of(kind), as_bool("check_ranks", check_ranks)
        if not isinstance(transport, str) or transport not in TRANSPORTS:
            expected = f"one of {', '.join(TRANSPORTS)}"
            raise ValueError(f"transport must be {expected}, got {shown(transport)}")
        strategies: list[LinearStrategy[Any]] = [AllGather(kind), Scan(kind, blocks), Tree(kind)]
        if recurrence.constant_transition:
            strategies[:2] = LASP2(), ZeCO(blocks)
        strategy = strategies[TRANSPORTS.index(transport)]
        super().__init__(strategy, group, 1, check_ranks, routing)
        self.kind, self.transport, self._decay = recurrence, transport, recurrence.decay

    def extra_repr(self) -> str:
        options = f"kind={self.kind.name!r}, transport={self.transport!r}"
        return f"{super().extra_repr()}, {options}"

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
        **others: Never,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute recurrent attention of this rank's queries over the tokens of all ranks.

        `layout`, `scale`, `return_state`, DTensors, gradients and errors are as in
        `LASP2Attention.forward`. Keys are used unchanged: models whose keys have length 1 normalise
        them first.

        Args:
            q: (T_local, Hq, K) or (B, T_local, Hq, K), in the layout's local order; fp64, fp32,
                bf16 or fp16.
            k: (T_local, Hk, K) or with the batch in front.
            v: (T_local, Hv, V) or with the batch in front. One of Hk and Hv must be a multiple of
                the other. H is the larger, and Hq divides H or is a multiple of it. Where there are
                fewer heads of one than of another, each serves the same number of consecutive ones.
            log_decay: at most 0, shaped as in the table, with the batch in front where q has one
                and the decay has tokens. Any float dtype: use fp32 where decays are close to 1.
                Values are not checked. A constant decay must be the same on all ranks, and has no
                gradient.
            beta: shaped as in the table, with the batch in front where q has one.
            initial_state: (documents, H, K, V), as in `LASP2Attention.forward`. With maps, a rank
                has the gradient of the documents whose first token it holds.

        Returns:
            out (T_local, max(Hq, H), V), or with the batch in front, in q's dtype; or (out, state),
            both differentiable, with the state like `initial_state`.
        """
        if others:
            self._refuse_others(others, q, k, v)
        return self._attend(
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
        """Continue each of N documents by one or t tokens; return out and the next state.

        It is plain PyTorch and sends nothing. q, k and v are (N, heads, dim) or (N, t, heads, dim),
        and so are the gates. The state (N, H, K, V) is from a call or an earlier step.
        `seqpar.linear.decode.decode_step` lists the errors.
        """
        return decode_step(self.kind.name, Inputs(q, k, v, log_decay, beta), state, scale)

    def _operator_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any
    ) -> tuple[CallTensors, LinearArguments, HeadPlacement]:
        if self._bound.strategy.family == "linear":
            if options.get("beta") is not None:
                raise ValueError(f"beta must be None for the kind {self.kind.name!r}")
            if (options.get("log_decay") is None) != (self.kind.decay is None):
                needed = "None" if self.kind.decay is None else "a tensor (H,)"
                raise ValueError(f"log_decay must be {needed} for the kind {self.kind.name!r}")
            q, k, v, options["scale"] = _with_equal_heads(q, k, v, options.get("scale", 1.0))
        return super()._operator_inputs(q, k, v, layout, **options)


def _with_equal_heads(
    q: Tensor, k: Tensor, v: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
    """Return q, k, v and scale, with heads repeated so that each has at least one per state."""
    if not all(isinstance(x, Tensor) and x.dim() > 2 and x.shape[-2] for x in (q, k, v)):
        return q, k, v, scale  # which is refused
    states = max(k.shape[-2], v.shape[-2])

    def repeated(x: Tensor, dim: int = -2) -> Tensor:
        heads = x.shape[dim]
        return x if heads >= states else x.repeat_interleave(states // heads, dim)

    if isinstance(scale, Tensor) and tuple(scale.shape) == (q.shape[-2],):
        scale = repeated(scale, 0)
    return repeated(q), repeated(k), repeated(v), scale
