"""The tensors of a call of linear attention, their checks, and the sharing of heads.

Letters of shapes: B is the batch, T the number of rows, H the number of states, Hq, Hk and Hv the
numbers of heads of queries, keys and values, K the head dim of queries and keys, and V the head dim
of values.

H = max(Hk, Hv). Hk and Hv divide H, and Hq divides H or is a multiple of H. If a tensor has h heads
and another tensor has n·h heads, each head of the first tensor is used for n consecutive heads of
the second tensor, as in `repeat_interleave`. In GQA, for example, several query heads use one key
head. In Qwen3-Next, several value heads use one key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.core.arguments import check_tensor
from seqpar.core.dtypes import DTYPES, accumulator_dtype
from seqpar.linear.kinds import Kind


class Inputs(NamedTuple):
    """The tensors of a call. `log_decay` and `beta` are None for kinds without decay or delta
    rule.
    """

    q: Tensor  # (B, T, Hq, K)
    k: Tensor  # (B, T, Hk, K)
    v: Tensor  # (B, T, Hv, V)
    # (H,), (B, T, H) or (B, T, H, K), as the kind requires. Values are at most 0, and may be −∞.
    log_decay: Tensor | None = None
    beta: Tensor | None = None  # (B, T, H)

    @property
    def heads(self) -> int:
        """H, the number of states."""
        return max(self.k.shape[2], self.v.shape[2])

    @property
    def out_shape(self) -> tuple[int, ...]:
        batch, rows, heads, _ = self.q.shape
        return batch, rows, max(heads, self.heads), self.v.shape[3]

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a state: (B, H, K, V)."""
        return self.k.shape[0], self.heads, self.k.shape[3], self.v.shape[3]


class CallTensors(NamedTuple):
    """The tensors that torch's operator receives: the inputs, and the initial states or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    initial: Tensor | None  # (documents, B, H, K, V)

    @property
    def inputs(self) -> Inputs:
        return Inputs(*self[:-1])


class Gradients(NamedTuple):
    """The gradients of `Inputs`, in the dtypes of the inputs. If an input is None, its gradient is
    None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs, make: Callable[[Tensor], Tensor]) -> Gradients:
        made = [None if x is None else make(x) for x in inputs]
        return cls(*made)  # type: ignore[arg-type]  # None where an input is None


def empty_inputs(shape: OperandShape, tokens: int, device: torch.device) -> Inputs:
    """Return uninitialised q, k and v for a rank with `tokens` tokens, without log_decay and
    beta.
    """
    heads, dims = (shape.heads, shape.kv_heads, shape.kv_heads), (shape.dim, shape.dim)
    return Inputs(
        *(
            torch.empty(shape.batch, tokens, *sizes, dtype=shape.dtype, device=device)
            for sizes in zip(heads, (*dims, shape.value_dim), strict=True)
        )
    )


def expand(inputs: Inputs) -> Inputs:
    """Return the inputs in the accumulator's dtype, with one head for each state.

    q becomes (B, T, max(Hq, H), K), k (B, T, H, K), v (B, T, H, V), log_decay (B, T, H, 1 or K) and
    beta (B, T, H, 1). Without decay, log_decay is None.
    """
    dtype, heads = accumulator_dtype(inputs.q.dtype), inputs.heads
    q, k, v, log_decay, beta = inputs
    if log_decay is not None:
        if log_decay.dim() == 1:
            log_decay = log_decay.expand(*q.shape[:2], heads)
        log_decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).to(dtype)
    beta = None if beta is None else beta[..., None].to(dtype)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    q = repeated(q, max(heads, q.shape[2]))
    return Inputs(q, repeated(k, heads), repeated(v, heads), log_decay, beta)


def expanded_gradients(inputs: Inputs) -> Gradients:
    """Return uninitialised gradients, which a backend fills and passes to `fold`.

    The gradients of q, k and v have the shapes and dtypes of `inputs`. The gradients of log_decay
    and beta are in the accumulator's dtype, with the shapes that `expand` returns.
    """
    dtype, rows = accumulator_dtype(inputs.q.dtype), inputs.q.shape[:2]

    def empty(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.new_empty((*rows, inputs.heads, x.shape[3] if x.dim() == 4 else 1), dtype=dtype)

    q, k, v, log_decay, beta = inputs
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return Gradients(dq, dk, dv, empty(log_decay), empty(beta))


def fold(inputs: Inputs, gradients: Gradients) -> Gradients:
    """Return the gradients of `inputs`, given the gradients of `expand(inputs)`."""
    remaining = iter(x for x in gradients if x is not None)

    def folded(x: Tensor) -> Tensor:
        gradient = next(remaining)
        if x.dim() == 1:
            gradient = gradient.sum((0, 1, 3), dtype=torch.float64)
        elif x.dim() == 3:
            gradient = gradient[..., 0]
        elif x.shape[2] != gradient.shape[2]:
            gradient = gradient.unflatten(2, (x.shape[2], -1)).sum(3)
        return gradient.to(x.dtype)

    return Gradients.of(inputs, folded)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each of the h heads of x (B, T, h, …), so that the result has `heads` heads, a
    multiple of h.
    """
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def check_heads(inputs: Inputs) -> None:
    states = inputs.heads
    for name, x in (("k", inputs.k), ("v", inputs.v)):
        if states % x.shape[2]:
            expected = f"a number of heads that divides the {states} heads of the states"
            raise ValueError(f"{name} must have {expected}, got {x.shape[2]}")
    heads = inputs.q.shape[2]
    if states % heads and heads % states:
        expected = f"a multiple or a divisor of the {states} heads of the states"
        raise ValueError(f"q must have a number of heads that is {expected}, got {heads}")


def check_gates(kind: Kind, inputs: Inputs, rows: str) -> None:
    """Raise an error unless log_decay and beta have the shapes and dtypes that the kind needs.

    `rows` names the dimensions of rows in errors, such as "B, T_local".
    """
    sizes, heads, dim = tuple(inputs.q.shape[:2]), inputs.heads, inputs.q.shape[3]
    shapes: dict[str | None, tuple[str, tuple[int, ...]]] = {
        "constant": ("(H,)", (heads,)),
        "head": (f"({rows}, H)", (*sizes, heads)),
        "key": (f"({rows}, H, K)", (*sizes, heads, dim)),
    }
    wanted = shapes.get(kind.decay), shapes["head"] if kind.uses_beta else None
    gates = ("log_decay", inputs.log_decay), ("beta", inputs.beta)
    for (name, x), expected in zip(gates, wanted, strict=True):
        if expected is None or x is None:
            if (expected is None) != (x is None):
                needed = "None" if expected is None else f"a tensor {expected[0]}"
                found = "None" if x is None else f"one of shape {tuple(x.shape)}"
                raise ValueError(f"{name} must be {needed} for the kind {kind.name!r}, got {found}")
        elif tuple(x.shape) != expected[1] or x.dtype not in DTYPES:
            found = f"{tuple(x.shape)} of {x.dtype}"
            raise ValueError(f"{name} must be {expected[0]}, {expected[1]}, of floats, got {found}")


def check_constant_decay(log_decay: Tensor | None, kv_heads: int, device: torch.device) -> None:
    if log_decay is None:
        return
    check_tensor("log_decay", log_decay, device, or_cpu=True)
    shape, dtype = tuple(log_decay.shape), log_decay.dtype
    if shape != (kv_heads,) or dtype not in (torch.float32, torch.float64):
        expected = f"({kv_heads},), one per KV head, in fp32 or fp64"
        raise ValueError(f"log_decay must be {expected}, got {shape} of {dtype}")
