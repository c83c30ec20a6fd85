"""The linear primitive: (q, k, v, spans) -> out and states, and its backward.

    out_i = scale · q_i · (Σ_{j≤i} λ^{i−j} k_jᵀ v_j + λ^{i+1} S)        λ = exp(log_decay), one a KV head

within a span, whose first row is i = 0 and which begins with the state S. A span's own *state* Σ_j λ^{L−1−j} k_jᵀ v_j (L rows)
is all that later tokens of its document need of it; states of consecutive spans compose as λ^{L₂} S₁ + S₂, in any grouping.
What moves between ranks is a strategy's business; all of them compute with `forward` and `backward` alone.

Legend: B batch, T rows, H heads (Hq of queries, Hkv of keys and values), D head dim (Dv that of values).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar import tracing
from seqpar.attend import accumulator_dtype
from seqpar.geometry import Ints

BACKENDS = {"aten": "aten", "reference": "reference", "triton": "fused"}  # and their files
_NOMINAL_CHUNK = 64  # rows of which each sees all others, in what a trace counts


@cache
def backend(name: str) -> ModuleType:
    """The backend's module, loaded when first used."""
    return import_module(f"seqpar.backends.linear.{BACKENDS[name]}")


@dataclass(frozen=True)
class Recurrence:
    """scale, and λ = exp(log_decay), (Hkv,) in fp64 on the operands' device, or λ = 1. By which backend.

    Without `causal` there is no decay, and each row sees all rows of its document: out_i = scale · q_i · M, where M is the
    sum of all its states.
    """

    scale: float
    causal: bool
    backend: str
    log_decay: Tensor | None

    def power(self, exponents: Tensor, heads: int) -> Tensor:
        """(…, Hkv) fp64: λ^exponents, for integers of any shape on the operands' device; 0 where they are negative."""
        if self.log_decay is None:
            return (exponents >= 0).double()[..., None].expand(*exponents.shape, heads)
        return torch.exp(exponents[..., None] * self.log_decay).masked_fill((exponents < 0)[..., None], 0.0)


@dataclass(frozen=True, eq=False)
class Spans:
    """A rank's rows, cut into spans of which each is of one document.

    Span i is rows edges[i] … edges[i + 1] − 1. `enter[i]` is the index of the state with which it begins, and `leave[i]` that
    of its own state; −1 where it begins with none, or its state is not wanted. Backends keep tables in `lowered`.
    """

    edges: Ints
    enter: Ints
    leave: Ints
    lowered: dict[Any, Any] = field(default_factory=dict)

    @property
    def entering(self) -> int:
        return int((self.enter >= 0).sum())

    @property
    def leaving(self) -> int:
        return int((self.leave >= 0).sum())


class Forward(Protocol):
    """A forward in three steps: its making; `local`, what needs no other states, if there is time to bridge; and `finish`.

    states: (leaving spans, B, Hkv, D, Dv), in fp32 (fp64). `finish` takes the entering states, alike, or None if no span has
    one, and returns out (B, T, Hq, Dv) in q's dtype. Without `causal`, what enters is the sum M of all states, also the own.
    """

    states: Tensor

    def local(self) -> None: ...
    def finish(self, initial: Tensor | None) -> Tensor: ...


class Backward(Protocol):
    """A backward, likewise. states: (entering spans, B, Hkv, D, Dv), what the span's own rows add to the gradient of the state
    that it begins with. `finish` takes the gradients of the leaving spans' states, or None, and returns dq, dk and dv.
    """

    states: Tensor

    def local(self) -> None: ...
    def finish(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]: ...


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, recurrence: Recurrence) -> Forward:
    """Begin the forward of q (B, T, Hq, D), k (B, T, Hkv, D) and v (B, T, Hkv, Dv)."""
    made = backend(recurrence.backend).Forward
    shapes = (q.shape[:3] + v.shape[3:],)
    begin = partial(made, q, k, v, spans, recurrence)
    return _Traced(begin, q, k, v, spans.leaving, shapes, _Products(2, 0, 1))


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, spans: Spans, recurrence: Recurrence, initial: Tensor | None
) -> Backward:
    """Begin the backward, given dout (B, T, Hq, Dv) and what entered in forward."""
    made = backend(recurrence.backend).Backward
    shapes = q.shape, k.shape, v.shape
    begin = partial(made, q, k, v, dout, spans, recurrence, initial)
    return _Traced(begin, q, k, v, spans.entering, shapes, _Products(5, 2, 2))


class _Products(NamedTuple):
    """How many matrix products a forward or backward has, beside the one for its states."""

    within: int  # of rows with rows of a chunk
    local: int  # with states, before others have arrived
    finish: int  # and after


class _Traced:
    """A forward or backward whose steps a trace shows, or that something stands in for.

    What counts as the area of a step is how many pairs of query and key softmax attention would compute at its cost.
    """

    def __init__(
        self,
        begin: Callable[[], Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        states: int,
        shapes: tuple[torch.Size, ...],
        products: _Products,
    ) -> None:
        dim, value_dim, rows = q.shape[3], v.shape[3], q.shape[0] * q.shape[1] * q.shape[2]
        self._shapes, self._q = shapes, q
        area = rows * dim * value_dim // (dim + value_dim)
        self._finish_area = area * products.finish
        self._local_area = rows * _NOMINAL_CHUNK * products.within // 2 + area * products.local  # 0 once it is done
        self._work: Any = None
        with tracing.computing(lambda: area, q.device) as wanted:
            if wanted:
                self._work = begin()
        shape = (states, q.shape[0], k.shape[2], dim, value_dim)
        self.states: Tensor = self._work.states if wanted else q.new_zeros(shape, dtype=accumulator_dtype(q.dtype))

    def local(self) -> None:
        area, self._local_area = self._local_area, 0
        with tracing.computing(lambda: area, self._q.device) as wanted:
            if wanted:
                self._work.local()

    def finish(self, states: Tensor | None) -> Any:
        area = self._finish_area + self._local_area
        with tracing.computing(lambda: area, self._q.device) as wanted:
            if wanted:
                return self._work.finish(states)
        made = [self._q.new_empty(shape) for shape in self._shapes]
        return made[0] if len(made) == 1 else tuple(made)


def step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One token of each document, as in decoding: q (N, Hq, D), k (N, Hkv, D), v (N, Hkv, Dv), state (N, Hkv, D, Dv)
    -> out (N, Hq, Dv) in q's dtype, and the next state, in fp32 (fp64)."""
    decay = 1.0 if log_decay is None else torch.exp(log_decay.double()).to(state)[:, None, None]
    state = state * decay + k[..., :, None].to(state.dtype) * v[..., None, :].to(state.dtype)
    grouped = q.to(state.dtype).unflatten(1, (k.shape[1], -1)) * scale
    return (grouped @ state).flatten(1, 2).to(q.dtype), state
