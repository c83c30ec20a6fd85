"""The linear primitive: (q, k, v, spans) -> out and states, and its backward.

    out_i = scale · q_i · (Σ_{j≤i} λ^{i−j} k_jᵀ v_j + λ^{i+1} S)

is the output of row i of a span, whose first row is i = 0 and which the state S enters; λ =
exp(log_decay), one for each KV head. Later tokens of the document need only the state of a span's L
rows, Σ_j λ^{L−1−j} k_jᵀ v_j. States of consecutive spans compose as λ^{L₂} S₁ +
S₂, in any grouping. Every strategy computes only with
`begin_forward` and `begin_backward`.

Legend: B batch, T rows, H heads (Hq of queries, Hkv of keys and values), D head dim (Dv of values).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from seqpar.attention.backend import load_backend
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import Memo
from seqpar.linear.routes import SpanStates
from seqpar.linear.steps import NOMINAL_CHUNK, HookedSteps


@dataclass(frozen=True)
class StateOptions:
    """The options of a call that change its arithmetic.

    Attributes:
        scale: what q·k is multiplied by.
        causal: if False, nothing decays and each row attends to its whole document:
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


def backend(name: str) -> ModuleType:
    """Return the module of a linear backend."""
    return load_backend("linear", name)


class ForwardSteps(Protocol):
    """A forward in three steps, so that an exchange of states fits between them.

    The first is the constructor, which computes `states`: for each span that a state leaves, the
    state of only the span's rows, (states_out, B, Hkv, D, Dv) in fp32 (fp64 for fp64). `local` is
    optional: it gives a rank work while states travel, which `finish` does otherwise.
    """

    states: Tensor

    def local(self) -> None:
        """Compute all that does not depend on the states that enter spans."""

    def finish(self, states_in: Tensor | None) -> Tensor:
        """Return out (B, T, Hq, Dv) in q's dtype, given the states that enter spans, if any does.

        `states_in` is (states_in, B, Hkv, D, Dv). Without causality the sum M of all states of the
        document, including the run's own, enters a run.
        """


class BackwardSteps(Protocol):
    """A backward in three steps, like `ForwardSteps`.

    `states` (states_in, B, Hkv, D, Dv) has the part of the gradients of entering states that comes
    through the span's own rows.
    """

    states: Tensor

    def local(self) -> None:
        """Compute all that does not depend on the gradients of states that leave spans."""

    def finish(self, states_out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv, given the gradients of the states that leave spans, if any does.

        These are (states_out, B, Hkv, D, Dv).
        """


def begin_forward(
    q: Tensor, k: Tensor, v: Tensor, spans: SpanStates, options: StateOptions
) -> ForwardSteps:
    """Begin the forward of q (B, T, Hq, D), k (B, T, Hkv, D) and v (B, T, Hkv, Dv).

    Its `states` are then computed.
    """
    make = backend(options.backend).Forward
    return _HookedSteps[ForwardSteps, Tensor](
        lambda: make(q, k, v, spans, options),
        (q, k, v),
        spans.states_out,
        _Products(within=2, local=0, finish=1, backward=False),
        lambda: q.new_empty(q.shape[:3] + v.shape[3:]),
    )


def begin_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    spans: SpanStates,
    options: StateOptions,
    states_in: Tensor | None,
) -> BackwardSteps:
    """Begin the backward, given dout (B, T, Hq, Dv) and the states that entered in forward.

    Its `states` are then computed.
    """
    make = backend(options.backend).Backward
    return _HookedSteps[BackwardSteps, tuple[Tensor, Tensor, Tensor]](
        lambda: make(q, k, v, dout, spans, options, states_in),
        (q, k, v),
        spans.states_in,
        _Products(within=5, local=2, finish=2, backward=True),
        lambda: (q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)),
    )


class _Products(NamedTuple):
    """How many matrix products a pass has, in addition to the one for its states."""

    within: int  # of a chunk's rows with its rows
    local: int  # of rows with states, in `local`
    finish: int  # of rows with states, in `finish`
    backward: bool


S = TypeVar("S", ForwardSteps, BackwardSteps)
R = TypeVar("R")


class _HookedSteps(HookedSteps[S, R]):
    """Steps whose areas follow from the numbers of matrix products."""

    def __init__(
        self,
        make: Callable[[], S],
        operands: tuple[Tensor, Tensor, Tensor],
        states: int,
        products: _Products,
        arbitrary: Callable[[], R],
    ) -> None:
        q, k, v = operands
        dim, value_dim, rows = q.shape[3], v.shape[3], q.shape[0] * q.shape[1] * q.shape[2]
        shape = q.shape[0] * q.shape[1], k.shape[2], (dim, value_dim), products.backward
        super().__init__(q.device, shape, arbitrary)
        area = rows * dim * value_dim // (dim + value_dim)
        self._finish_area = area * products.finish
        within = rows * NOMINAL_CHUNK * products.within // 2
        self._local_area = within + area * products.local  # 0 once `local` has run
        self._total = max(1, area + self._local_area + self._finish_area)
        self.steps = self.compute(area, area / self._total, make)
        if self.steps is not None:
            self.states: Tensor = self.steps.states
        else:
            size = states, q.shape[0], k.shape[2], dim, value_dim
            self.states = q.new_zeros(size, dtype=accumulator_dtype(q.dtype))

    def local(self) -> None:
        area, self._local_area = self._local_area, 0
        self.compute(area, area / self._total, lambda: self.made.local())

    def finish(self, states: Tensor | None) -> R:
        area = self._finish_area + self._local_area
        result = self.compute(area, area / self._total, lambda: self.made.finish(states))
        return self._arbitrary() if result is None else result  # type: ignore[return-value]
