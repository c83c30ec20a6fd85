"""Recurrent attention, such as Gated DeltaNet or Mamba-2, across ranks.

A *state* is a matrix for each head, which summarises the tokens of a document so far. A *span* is a
range of consecutive tokens of a document on one rank. The *map* of a span is the function from the
state before the span to the state after the span. Ranks exchange maps, and compose the maps along
each document. The loop `lasp2` of docs/internals/in_300_lines.md shows the idea for states.
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
    """Recurrent attention over a packed batch whose tokens are distributed over the ranks of a
    group.

    Within each document, with a state S (K, V) for each of H = max(Hk, Hv) heads,

        S̄ₜ = diag(exp gₜ) Sₜ₋₁
        Sₜ = S̄ₜ + kₜ vₜᵀ, or by the delta rule S̄ₜ + βₜ kₜ (vₜ − S̄ₜᵀ kₜ)ᵀ
        outₜ = scale · Sₜᵀ qₜ

    where g is `log_decay` and β is `beta`. Their shapes depend on the kind:

    | kind | `log_decay` | `beta` | as in |
    |---|---|---|---|
    | "linear" | | | linear attention |
    | "constant_decay" | (H,) | | RetNet, Lightning Attention, MiniMax |
    | "scalar_decay" | (T_local, H) | | Mamba-2, simple GLA |
    | "vector_decay" | (T_local, H, K) | | GLA |
    | "delta" | | (T_local, H) | DeltaNet |
    | "gated_delta" | (T_local, H) | (T_local, H) | Gated DeltaNet: Qwen3-Next, Qwen3.5 |
    | "kda" | (T_local, H, K) | (T_local, H) | Kimi Linear |

    A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is a
    pair of matrices (A, N): if S is the state before the span, the state after the span is A S + N.
    The sizes of states and maps do not depend on the number of tokens. A state has s = B·H·K·V·e
    bytes, and a map has m = s + B·H·a·e bytes, where e is 4 (8 for fp64). a is K for a decay per
    key channel, K² for the delta rule, and 1 for the other kinds.

    A layout is refused if it has so many short spans that sending maps would take more bytes than
    sending keys and values. This is the case if a rank has more than 4 spans of a document, and
    these spans have on average fewer than (K·V + a)·e / ((K + V)·b) tokens, where b is the number
    of bytes of an element of q.

    For backward, forward keeps the inputs, and a state for each span that does not begin its
    document. With `initial_state`, a state is kept for each span. Backward sends as many bytes as
    forward, in the other direction.

    `transport="all_gather"`: ranks send maps in one exchange. The exchange is posted before a rank
    computes with its own tokens, and this computation hides the exchange. A rank sends the map of
    each of its spans, of m bytes, to every rank that has a later span of the document. For the
    first span of a document (in backward, the last span), a rank sends a state of s bytes instead
    of the map. With a contiguous layout, a rank sends m bytes per document to each later rank. Each
    rank receives up to P maps, and applies one map after another. On few ranks, "all_gather" is the
    transport with the least work. On 256 ranks, the P maps of m bytes each take gigabytes.

    `transport="scan"`: a state is sent from span to span, cut into `blocks` blocks. A rank sends s
    bytes for each of its spans after which the document continues on another rank, for any number
    of ranks. The transport takes P − 1 steps. "scan" sends the fewest bytes. Use "scan" with slow
    links and few ranks.

    `transport="tree"`: maps are composed by recursive doubling. If a document has n spans, there
    are ⌈log₂ n⌉ steps. In step d, the rank with span i sends m bytes to the rank with span i + 2ᵈ
    if i ≥ 2ᵈ, and s bytes if i < 2ᵈ. In each step, a rank composes two maps for each of its spans.
    A rank holds at most about seven maps per span, for any number of ranks. Use "tree" with many
    ranks.

    The kinds "linear" and "constant_decay" send maps only with "tree". With "all_gather" and
    "scan", they send the messages of `LASP2Attention`, and the rules of `LASP2Attention` for
    `log_decay` apply.

    With `return_state`, the rank that holds the last token of a document also sends the final
    state, of s bytes, to all other ranks in forward. Final states are sent in a separate exchange,
    which is step 1 in traffic and traces. The last computation of forward hides this exchange.
    Backward begins with the reverse exchange: each rank sends its gradient of a final state, of s
    bytes, to the rank that holds the document's last token. The first computation of backward hides
    this exchange.

    Args:
        group: a process group or a 1-D DeviceMesh. All ranks must make the calls on a group in the
            same order. If several threads call at the same time, each needs a separate group.
        kind: "linear", "constant_decay", "scalar_decay", "vector_decay", "delta", "gated_delta" or
            "kda".
        transport: "all_gather", "scan" or "tree".
        check_ranks, routing: as in `LASP2Attention`. "scan" and "tree" require `routing=None`.
        blocks: the largest number of blocks into which "scan" cuts a state. Blocks have equal
            sizes. A block has some whole heads, or some whole columns of one head.

    The transports are from Sun et al., "LASP-2" (2025), algorithm 2; "ZeCO" (2025), section 3;
    Hillis and Steele, "Data parallel algorithms" (1986); and Martin and Cundy, "Parallelizing
    Linear Recurrent Neural Nets Over Sequence Length" (2018), section 2.
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
        `LASP2Attention.forward`. The call does not normalise keys. If a model needs keys of length
        1, normalise the keys before the call.

        Args:
            q: (T_local, Hq, K) or (B, T_local, Hq, K), in the layout's local order; fp64, fp32,
                bf16 or fp16.
            k: (T_local, Hk, K), with a leading batch dimension if q has one.
            v: (T_local, Hv, V), with a leading batch dimension if q has one. One of Hk and Hv must
                be a multiple of the other, and H is the larger one. Hq must divide H or be a
                multiple of H. If a tensor has fewer heads than another tensor, each of its heads is
                used with the same number of consecutive heads of the other tensor.
            log_decay: at most 0, with the shape in the table. If q has a batch dimension and the
                decay has tokens, the decay has the batch dimension too. Any float dtype is
                accepted. Use fp32 for decays close to 1. Values are not checked. A constant decay
                must be the same on all ranks, and has no gradient.
            beta: has the shape in the table, with a leading batch dimension if q has one.
            initial_state: (documents, H, K, V), as in `LASP2Attention.forward`. If maps are sent, a
                rank gets the gradient for those documents whose first token it holds.

        Returns:
            out (T_local, max(Hq, H), V), with a leading batch dimension if q has one, in q's dtype.
            With `return_state`, (out, state), where the state is like `initial_state`. Both are
            differentiable.
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
        """Continue each of N documents by one or several tokens. Return out and the next state.

        The method is implemented in plain PyTorch, and sends nothing. q, k and v are (N, heads,
        dim), or (N, t, heads, dim) for t tokens. `log_decay` and `beta` have the same leading
        dimensions. The state (N, H, K, V) comes from a call with `return_state` or from an earlier
        step. `seqpar.linear.decode.decode_step` lists the errors.
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
    """Repeat heads of q, k, v and scale until each has at least as many heads as there are
    states.
    """
    if not all(isinstance(x, Tensor) and x.dim() > 2 and x.shape[-2] for x in (q, k, v)):
        return q, k, v, scale  # the call will refuse them
    states = max(k.shape[-2], v.shape[-2])

    def repeated(x: Tensor, dim: int = -2) -> Tensor:
        heads = x.shape[dim]
        return x if heads >= states else x.repeat_interleave(states // heads, dim)

    if isinstance(scale, Tensor) and tuple(scale.shape) == (q.shape[-2],):
        scale = repeated(scale, 0)
    return repeated(q), repeated(k), repeated(v), scale
