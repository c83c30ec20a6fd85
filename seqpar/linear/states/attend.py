"""The linear primitive: (q, k, v, spans) -> out and states, and its backward.

    out_i = scale · q_i · (Σ_{j≤i} λ^{i−j} k_jᵀ v_j + λ^{i+1} S)

is the output of row i of a span, whose first row is i = 0 and which the state S enters; λ =
exp(log_decay), one for each KV head. The state of a span's L rows alone, Σ_j λ^{L−1−j} k_jᵀ v_j, is
all that later tokens of its document need of it. States of consecutive spans compose as λ^{L₂} S₁ +
S₂, in any grouping. What moves between ranks is a strategy's business; every strategy computes with
`begin_forward` and `begin_backward` alone.

Legend: B batch, T rows, H heads (Hq of queries, Hkv of keys and values), D head dim (Dv of values).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.attention.backend import load_backend
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.hooks import hooks
from seqpar.core.memo import Memo
from seqpar.linear.spans import SpanStates


@dataclass(frozen=True)
class StateOptions:
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


_NOMINAL_CHUNK = 64  # rows that a trace assumes are computed together, each seeing all of them


def backend(name: str) -> ModuleType:
    """Return the module of a linear backend."""
    return load_backend("linear", name)


class LinearWork(NamedTuple):
    """What a step of a forward or backward computes.

    Attributes:
        area: how many pairs of query and key would cost softmax attention the same.
        share: of the whole pass's area, a fraction.
        tokens: rows, of all of the batch.
        heads, dims: KV heads, and the head dims D and Dv.
        backward: which pass it is in.
    """

    area: int
    share: float
    tokens: int
    heads: int
    dims: tuple[int, int]
    backward: bool


class ForwardSteps(Protocol):
    """A forward in three steps, so that an exchange of states fits between them.

    The first is the constructor, which computes `states`, those that leave spans: (states_out, B,
    Hkv, D, Dv) in fp32 (fp64 for fp64), each of its span's rows alone. `local` is optional: it
    gives a rank work while states travel, which `finish` does otherwise.
    """

    states: Tensor

    def local(self) -> None:
        """Compute all that does not depend on the states that enter spans."""

    def finish(self, states_in: Tensor | None) -> Tensor:
        """Return out (B, T, Hq, Dv) in q's dtype, given the states that enter spans, if any does.

        `states_in` is (states_in, B, Hkv, D, Dv). Without causality what enters a run is the sum M
        of all states of the document, that of the run included.
        """


class BackwardSteps(Protocol):
    """A backward in three steps, like `ForwardSteps`.

    `states` (states_in, B, Hkv, D, Dv) has the gradients of the states that enter spans, as far as
    they come through the span's rows alone.
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
    return _HookedSteps(
        lambda: make(q, k, v, spans, options),
        (q, k, v),
        spans.states_out,
        (q.shape[:3] + v.shape[3:],),
        _Products(within=2, local=0, finish=1),
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
    return _HookedSteps(
        lambda: make(q, k, v, dout, spans, options, states_in),
        (q, k, v),
        spans.states_in,
        (q.shape, k.shape, v.shape),
        _Products(within=5, local=2, finish=2),
    )


class _Products(NamedTuple):
    """How many matrix products a forward or backward has, besides the one for its states."""

    within: int  # of a chunk's rows with its rows
    local: int  # of rows with states, in `local`
    finish: int  # of rows with states, in `finish`


class _HookedSteps:
    """A forward or backward of a backend whose steps go through hooks, to be traced or replaced.

    The area of a step is how many pairs of query and key would cost softmax attention the same.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        operands: tuple[Tensor, Tensor, Tensor],
        states: int,
        result_shapes: tuple[torch.Size, ...],
        products: _Products,
    ) -> None:
        q, k, v = operands
        dim, value_dim, rows = q.shape[3], v.shape[3], q.shape[0] * q.shape[1] * q.shape[2]
        self._q, self._result_shapes = q, result_shapes
        self._shape = q.shape[0] * q.shape[1], k.shape[2], (dim, value_dim), len(result_shapes) > 1
        area = rows * dim * value_dim // (dim + value_dim)
        self._finish_area = area * products.finish
        within = rows * _NOMINAL_CHUNK * products.within // 2
        self._local_area = within + area * products.local  # 0 once `local` has run
        self._total = area + self._local_area + self._finish_area
        self._steps: Any = self._compute(area, make)
        if self._steps is not None:
            self.states: Tensor = self._steps.states
        else:
            shape = states, q.shape[0], k.shape[2], dim, value_dim
            self.states = q.new_zeros(shape, dtype=accumulator_dtype(q.dtype))

    def local(self) -> None:
        area, self._local_area = self._local_area, 0
        self._compute(area, lambda: self._steps.local())

    def finish(self, states: Tensor | None) -> Any:
        area = self._finish_area + self._local_area
        result = self._compute(area, lambda: self._steps.finish(states))
        if result is not None:
            return result
        arbitrary = [self._q.new_empty(shape) for shape in self._result_shapes]
        return arbitrary[0] if len(arbitrary) == 1 else tuple(arbitrary)

    def _compute(self, area: int, step: Callable[[], Any]) -> Any:
        work = lambda: LinearWork(area, area / max(1, self._total), *self._shape)  # noqa: E731
        return hooks.compute(work, self._q.device, step)
