"""Check and prepare q, k and v, for both kinds of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from seqpar.attention.operators import refuse_tangents
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import check_tensor
from seqpar.core.dtypes import DTYPES
from seqpar.layout.geometry import Geometry
from seqpar.layout.layout import Layout

Scale = TypeVar("Scale")


class OperandShape(NamedTuple):
    """The dtype and the sizes of q (B, T, Hq, D), k (B, T, Hkv, D) and v (B, T, Hkv, Dv).

    The number of tokens T is left out, because it differs between ranks. All fields are equal on
    all ranks.
    """

    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> OperandShape:
        return cls.of_sizes(q.dtype, q.shape, k.shape, v.shape)

    @classmethod
    def of_sizes(
        cls, dtype: torch.dtype, q: Sequence[int], k: Sequence[int], v: Sequence[int]
    ) -> OperandShape:
        return cls(dtype, q[0], q[2], k[2], q[3], v[3])

    def described(self) -> dict[str, object]:
        """Return the fields by argument name, so that ranks can compare them."""
        return {
            "dtype": str(self.dtype),
            "batch size": self.batch,
            "heads of q": self.heads,
            "heads of k": self.kv_heads,
            "head dim of q": self.dim,
            "head dim of v": self.value_dim,
        }


def prepare_operands(
    q: Tensor, k: Tensor, v: Tensor, **others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as (B, T, H, D), with a batch dimension of 1 if they had none.

    Under autocast, q, k and v are cast as `F.scaled_dot_product_attention` casts its operands.
    Raises a ValueError for values that are not tensors, tensors with a wrong number of dimensions
    or without heads, operands or `others` on different devices, and tensors with forward-mode
    tangents.
    """
    check_tensor("q", q)
    dims, device = q.dim(), q.device
    shapes = {3: "(T, H, D)", 4: "(B, T, H, D)"}
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, device)
        if x.dim() != dims or dims not in shapes:
            expected = f"{shapes[dims]} like q" if dims in shapes else " or ".join(shapes.values())
            raise ValueError(f"{name} must be {expected}, got {tuple(x.shape)}")
        if 0 in x.shape[-2:]:
            wanted = "at least one head and a head dim of at least 1"
            raise ValueError(f"{name} must have {wanted}, got {tuple(x.shape)}")
    for name, other in others.items():
        if other is not None:
            check_tensor(name, other, device)
    refuse_tangents(q=q, k=k, v=v, **others)
    q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    return (q[None], k[None], v[None]) if dims == 3 else (q, k, v)


def as_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    casts = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if casts else x


def fold_scale(name: str, q: Tensor, scale: Scale) -> tuple[Tensor, Scale | float]:
    """Multiply q with some scales of q·k, and return q and the remaining scale.

    A scale is multiplied with q if it is a tensor that requires a gradient, or a tensor (Hq,) with
    one scale per head. The product is rounded once, to q's dtype, and the returned scale is 1. All
    other scales are returned unchanged.
    """
    if not isinstance(scale, Tensor):
        return q, scale
    refuse_tangents(**{name: scale})
    if not (scale.dim() or scale.requires_grad):
        return q, scale
    heads, shape = tuple(q.shape[-2:-1]), tuple(scale.shape)
    if shape not in ((), heads) or scale.dtype not in DTYPES or scale.device != q.device:
        expected = f"a number, or a float tensor () or {heads}, one per query head, on {q.device}"
        found = f"{shape} of {scale.dtype} on {scale.device}"
        raise ValueError(f"{name} must be {expected}, got {found}")
    # A scale without dimensions would be cast to q's dtype, and its gradient would be summed in q's
    # dtype.
    return (q * scale.reshape(-1, 1)).to(q.dtype), 1.0


@contextmanager
def naming_rank(comm: Comm) -> Iterator[None]:
    """Append this rank to the message of a ValueError or TypeError raised within the context."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        rank = f" (rank {comm.rank} of {comm.size})"
        raise kind(str(error).removesuffix(rank) + rank) from None


def check_layouts(**layouts: object) -> None:
    for name, value in layouts.items():
        if not isinstance(value, Layout):
            way_out = "make one with seqpar.Layout.zigzag(cu_seqlens, ranks)"
            raise ValueError(
                f"{name} must be a seqpar.Layout, got {type(value).__name__}: {way_out}"
            )


def check_ranks_of(comm: Comm, **layouts: Geometry) -> None:
    for name, layout in layouts.items():
        if layout.ranks != comm.size:
            expected = f"the group's {comm.size} ranks"
            raise ValueError(f"{name} must be for {expected}, got one for {layout.ranks}")


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be of one of the dtypes {DTYPES}, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            way_out = f"cast {name}, or call under torch.autocast"
            raise ValueError(f"{name} must be of q's dtype, {q.dtype}, got {x.dtype}: {way_out}")


def check_operands(q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int) -> None:
    """Raise an error for a wrong shape of q, k or v.

    The shapes are q (B, tokens, Hq, D), k (B, kv_tokens, Hkv, D) and v (B, kv_tokens, Hkv, Dv), and
    Hq is a multiple of Hkv.
    """
    check_rows(q, k, v, tokens, kv_tokens)
    check_kv_heads(q, k, v)


def check_kv_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    heads, kv_heads = q.shape[2], k.shape[2]
    if v.shape[2] != kv_heads:
        raise ValueError(f"v must have k's number of heads, {kv_heads}, got {v.shape[2]}")
    if heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's {kv_heads} heads, got {heads}")


def check_rows(q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int) -> None:
    check_dtypes(q, k, v)
    for name, x, expected in (("q", q, tokens), ("k", k, kv_tokens), ("v", v, kv_tokens)):
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have q's batch size, {q.shape[0]}, got {x.shape[0]}")
        if x.shape[1] != expected:
            wanted = f"the {expected} tokens its layout gives this rank"
            found = f"{x.shape[1]} in (B, T, H, D) = {tuple(x.shape)}"
            raise ValueError(f"{name} must have {wanted}, got {found}{_way_out(name, x, expected)}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have q's head dim, {q.shape[3]}, got {k.shape[3]}")


def _way_out(name: str, x: Tensor, expected: int) -> str:
    """Return a text that says how to give a tensor the expected number of tokens. Return "" unless
    the tensor seems to be transposed or not sharded.
    """
    if x.shape[2] == expected:
        return f": if heads come before tokens, pass {name}.transpose(-3, -2)"
    if x.shape[1] > expected:
        return f": if {name} has the tokens of all ranks, pass layout.shard({name}, attn.rank)"
    return ""
