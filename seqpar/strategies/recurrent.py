"""Recurrent attention: the maps of spans are sent, and composed along each document.

The kinds of recurrence are in `seqpar.recurrent.kinds`, each beside its paper, and the transports
in `seqpar.recurrent.transports`. Where a state only decays at a constant rate, spans need no
transitions of each other, and LASP-2 and ZeCO send states alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.arguments import shown
from seqpar.comm.dtensor import HeadPlacement
from seqpar.comm.exchange import Group
from seqpar.comm.routing import Routing
from seqpar.layout.layout import Layout
from seqpar.recurrent.kinds import kind as kind_of
from seqpar.recurrent.module import RecurrentModule
from seqpar.recurrent.transports.all_gather import AllGather
from seqpar.strategies.lasp2 import TRANSPORTS as OF_STATES
from seqpar.strategies.lasp2 import LASP2Attention

TRANSPORTS = (AllGather.transport,)


class RecurrentAttention(RecurrentModule):
    """Recurrent attention whose maps are sent; see `RecurrentModule` for the call."""

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
        recurrence = kind_of(kind)
        if not isinstance(transport, str) or transport not in TRANSPORTS:
            expected = f"one of {', '.join(TRANSPORTS)}"
            raise ValueError(f"transport must be {expected}, got {shown(transport)}")
        of_states = None
        if (
            transport in OF_STATES
            and recurrence.transition == "head"
            and (recurrence.decay in (None, "constant"))
        ):
            of_states = LASP2Attention(group, transport, blocks, check_ranks, routing=routing)
            strategy: Any = of_states._bound.strategy
        else:
            strategy = AllGather(kind)
        super().__init__(strategy, group, 1, check_ranks, routing)
        self.kind, self.transport, self._of_states = recurrence, transport, of_states

    def extra_repr(self) -> str:
        """Return what the module's representation says beside its name."""
        options = f"kind={self.kind.name!r}, transport={self.transport!r}"
        return f"{super().extra_repr()}, {options}"

    @property
    def _operator(self) -> Any:
        if self._of_states is not None:
            return torch.ops.seqpar.linear_attention
        return super()._operator

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
        q, k, v = _alike(q, k, v)
        return self._of_states._operator_inputs(q, k, v, layout, **options)


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands of which k and v have as many heads as there are states, and q no fewer."""
    if not all(isinstance(x, Tensor) and x.dim() > 2 and x.shape[-2] for x in (q, k, v)):
        return q, k, v  # which is refused
    states = max(k.shape[-2], v.shape[-2])

    def repeated(x: Tensor) -> Tensor:
        heads = x.shape[-2]
        return x if heads >= states else x.repeat_interleave(states // heads, -2)

    return repeated(q), repeated(k), repeated(v)
