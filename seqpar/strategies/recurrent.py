"""Recurrent attention: ranks exchange the maps of spans and compose them along each document.

`seqpar.linear.kinds` has the kinds with their papers, and `seqpar.linear.maps` the transports. If a
state decays only at a constant rate, ranks know each other's transitions, so LASP-2 or ZeCO sends
only states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.comm.dtensor import HeadPlacement
from seqpar.comm.messages.exchange import Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import as_bool, shown
from seqpar.layout.layout import Layout
from seqpar.linear.kinds import kind as kind_of
from seqpar.linear.maps.gather import AllGather
from seqpar.linear.maps.module import RecurrentModule
from seqpar.linear.maps.scan import Scan
from seqpar.linear.maps.strategy import RecurrentStrategy
from seqpar.linear.maps.tree import Tree
from seqpar.strategies.lasp2 import TRANSPORTS as OF_STATES
from seqpar.strategies.lasp2 import LASP2Attention
from seqpar.strategies.registry import register

TRANSPORTS = (AllGather.transport, Scan.transport, Tree.transport)


@register
class RecurrentAttention(RecurrentModule):
    """Recurrent attention whose maps are sent; see `RecurrentModule` for the call.

    What a span does to the state that enters it is a map (A, N): the state that leaves is A S + N.
    Maps of consecutive spans compose, in the document's order alone. With numbers of 4 bytes (8 for
    fp64) a state has S = B·H·K·V·4 bytes and a map M = S + B·H·a·4, whatever the length of the
    document; a is 1 for a decay of each head, K of each key channel, and K² for the delta rule. The
    transports differ in what they send, and in how many exchanges; backward sends as much as
    forward, the other way round:

    `transport="all_gather"`: in one exchange, posted before the work within spans and hidden under
    it, a rank sends every other rank the map of each of its spans before that rank's last one of
    the document: M, and S for a document's first span (in backward the last). So for a contiguous
    document it sends each later rank M. Each rank receives P maps and folds them one after another,
    which is least work on few ranks, but on 256 ranks P·M are gigabytes.

    `transport="scan"`: states pass from span to span, in `blocks` blocks. A rank sends one S for
    each of its spans that another rank's span follows, however many ranks there are, in P − 1 steps
    instead of one: the fewest bytes, for slow links and few ranks.

    `transport="tree"`: recursive doubling. In step d of ⌈log₂ n⌉, for n spans of a document, the
    holder of span i sends M to that of span i + 2ᵈ, or S if i < 2ᵈ. For each of its spans a rank
    makes two compositions a step and holds some seven maps at most, however many ranks there are:
    for many ranks.

    The kinds "linear" and "constant_decay" need no transitions of others. With "all_gather" and
    "scan" they go through `LASP2Attention`, which sends states alone, fewer of them, and whose
    `log_decay` this is. Only with "tree" do they send maps.

    With `return_state`, the holder of a document's last token in forward also sends S to all other
    ranks, in an exchange of its own (step 1 in traffic and traces) hidden under the last work of
    the pass. Backward begins with the reverse: each rank sends its gradient of a final state, S, to
    that holder, hidden under the first work of the pass.

    Args:
        group: a process group or a 1-D DeviceMesh.
        kind: "linear", "constant_decay", "scalar_decay", "vector_decay", "delta", "gated_delta" or
            "kda".
        transport: "all_gather", "scan" or "tree".
        check_ranks: compare a digest of each call over the ranks first (32 bytes to each peer), so
            that ranks that disagree all raise the same ValueError instead of hanging.
        blocks: in how many blocks of equal size a state is passed on by "scan", at most: the most
            that make whole heads, or whole columns of a head.
        routing: how messages between nodes are sent over several NICs at once; None: straight, as
            "scan" and "tree" need it.

    Sun et al., "LASP-2" (2025), algorithm 2; "ZeCO" (2025), section 3; Hillis and Steele, "Data
    parallel algorithms" (1986); Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over
    Sequence Length" (2018), section 2.
    """

    strategy = RecurrentStrategy

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
        scan, of_states = Scan(kind, blocks), None
        if transport in OF_STATES and recurrence.constant_transition:
            of_states = LASP2Attention(group, transport, blocks, check_ranks, routing=routing)
        strategy: Any = of_states and of_states._bound.strategy
        if of_states is None:
            made = {x.transport: x for x in (AllGather(kind), scan, Tree(kind))}
            strategy = made[transport]
        super().__init__(strategy, group, 1, check_ranks, routing)
        self.kind, self.transport, self._of_states = recurrence, transport, of_states

    def extra_repr(self) -> str:
        """Return what the module's representation says beside its name."""
        options = f"kind={self.kind.name!r}, transport={self.transport!r}"
        return f"{super().extra_repr()}, {options}"

    def _run(self, tensors: Any, arguments: Any) -> list[Tensor]:
        if self._of_states is None:
            return super()._run(tensors, arguments)
        results: list[Tensor] = torch.ops.seqpar.linear_attention(*tensors, *arguments)
        return results

    def _to_call(self, tensors: Any, arguments: Any) -> Any:
        if self._of_states is not None:
            return self._of_states._to_call(tensors, arguments)
        return super()._to_call(tensors, arguments)

    def _operator_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any
    ) -> tuple[Any, Any, HeadPlacement]:
        if self._of_states is None:
            return super()._operator_inputs(q, k, v, layout, **options)
        log_decay, beta = options.get("log_decay"), options.pop("beta", None)
        if beta is not None:
            raise ValueError(f"beta must be None for the kind {self.kind.name!r}")
        if (log_decay is None) != (self.kind.decay is None):
            needed = "None" if self.kind.decay is None else "a tensor (H,)"
            raise ValueError(f"log_decay must be {needed} for the kind {self.kind.name!r}")
        q, k, v, scale = _alike(q, k, v, options.pop("scale", 1.0))
        return self._of_states._operator_inputs(q, k, v, layout, scale=scale, **options)


def _alike(q: Tensor, k: Tensor, v: Tensor, scale: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return operands of which k and v have as many heads as there are states, and q no fewer.

    With q goes its scale, if that is one a head.
    """
    if not all(isinstance(x, Tensor) and x.dim() > 2 and x.shape[-2] for x in (q, k, v)):
        return q, k, v, scale  # which is refused
    states = max(k.shape[-2], v.shape[-2])

    def repeated(x: Tensor, dim: int = -2) -> Tensor:
        heads = x.shape[dim]
        return x if heads >= states else x.repeat_interleave(states // heads, dim)

    if isinstance(scale, Tensor) and tuple(scale.shape) == (q.shape[-2],):
        scale = repeated(scale, 0)
    return repeated(q), repeated(k), repeated(v), scale
