"""What the recurrent primitive reads and returns, and which head serves which.

There are H = max(Hk, Hv) states. Each of Hk and Hv divides H, and Hq divides it or is a multiple of
it. Where there are fewer of one than of another, each serves as many consecutive ones, as
`repeat_interleave` has it: so do the queries that share a key under GQA, and the values that share
a key in Qwen3-Next.

Legend: B batch, T rows, H heads of states (Hq of queries, Hk of keys, Hv of values), K head dim of
queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The tensors of a call. `log_decay` and `beta` are None for kinds that have none.

    Attributes:
        q: (B, T, Hq, K).
        k: (B, T, Hk, K).
        v: (B, T, Hv, V).
        log_decay: at most 0, −∞ is allowed: (H,), (B, T, H) or (B, T, H, K), as the kind has it.
        beta: (B, T, H).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None

    @property
    def heads(self) -> int:
        """H, how many states there are."""
        return max(self.k.shape[2], self.v.shape[2])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of out: (B, T, max(Hq, H), V)."""
        batch, rows, heads, _ = self.q.shape
        return batch, rows, max(heads, self.heads), self.v.shape[3]

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a state: (B, H, K, V)."""
        return self.k.shape[0], self.heads, self.k.shape[3], self.v.shape[3]


class Gradients(NamedTuple):
    """The gradients of `Inputs`, in their dtypes; None for those that the kind does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs, make: Callable[[Tensor], Tensor]) -> Gradients:
        """Return what `make` returns for each of the inputs, one after another."""
        made = [None if x is None else make(x) for x in inputs]
        return cls(*made)  # type: ignore[arg-type]  # None where an input is None


@dataclass(frozen=True)
class RecurrentOptions:
    """How a call computes.

    Attributes:
        scale: what q·k is multiplied by.
        backend: the backend's name.
    """

    scale: float
    backend: str
