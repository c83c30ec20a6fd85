"""What the linear primitive reads: spans with the states that enter and leave them, and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.memo import Memo


@dataclass(frozen=True)
class LinearOptions:
    """How a call weighs its keys, and with which backend.

    Attributes:
        scale: what q·k is multiplied by.
        causal: without it there is no decay, and each row sees all rows of its document:
            out_i = scale · q_i · M, where M is the sum of the states of all its runs.
        backend: the backend's name.
        log_decay: (Hkv,) fp64 on the operands' device, log λ of each KV head; None: λ = 1.
        derived: the weights of states that have been computed. Calls with constant decays, which
            came from the CPU, share their options; with others, these are a call's own.
    """

    scale: float
    causal: bool
    backend: str
    log_decay: Tensor | None
    derived: Memo = field(default_factory=Memo, compare=False, repr=False)

    def power(self, exponents: Tensor, heads: int) -> Tensor:
        """Return (…, Hkv) fp64: λ^exponents, and 0 where an exponent is negative.

        `exponents` are integers of any shape on the operands' device.
        """
        if self.log_decay is None:
            return (exponents >= 0).double()[..., None].expand(*exponents.shape, heads)
        powers = torch.exp(exponents[..., None] * self.log_decay)
        return powers.masked_fill((exponents < 0)[..., None], 0.0)


@dataclass(frozen=True, eq=False)
class SpanStates:
    """A rank's spans, and which states enter and leave them.

    Tensors of states have only those that are needed, so each span has indices into them. Without
    causality runs take the place of spans.

    Attributes:
        edges: (spans + 1,) span i is rows edges[i] … edges[i + 1] − 1.
        state_in: (spans,) the index of the state that enters the span, among all that enter spans;
            −1: none does.
        state_out: (spans,) the index of the state that leaves the span, among all that leave spans;
            −1: nobody needs it.
        derived: what backends derive from the spans.
    """

    edges: Ints
    state_in: Ints
    state_out: Ints
    derived: Memo = field(default_factory=Memo, repr=False)

    @cached_property
    def states_in(self) -> int:
        """How many states enter spans."""
        return int((self.state_in >= 0).sum())

    @cached_property
    def states_out(self) -> int:
        """How many states leave spans."""
        return int((self.state_out >= 0).sum())
