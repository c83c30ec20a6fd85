"""Check and prepare q, k and v, for both kinds of attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from seqpar.attention.operators import refuse_tangents
from seqpar.comm.messages.exchange import Comm
from seqpar.comm.messages.header import CallDigest
from seqpar.core.arguments import check_tensor
from seqpar.core.dtypes import DTYPES
from seqpar.core.memo import MAX_KEPT_SETTINGS, Memo
from seqpar.layout.geometry import Geometry
from seqpar.layout.layout import Layout

_MAX_COMPARED_RANKS = 64  # comparing a layout span by span takes 0.1 ms per rank


Scale = TypeVar("Scale")


class OperandShape(NamedTuple):
    """Dtype and sizes, on all ranks, of q (B, T, Hq, D), k (B, T, Hkv, D), v (B, T, Hkv, Dv)."""

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
        """Return the fields by the names that users know, for the rank check."""
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
    """Return q, k and v as (B, T, H, D). Under autocast they are cast as SDPA's are.

    Raises a ValueError for arguments that would mislead the operator's dispatch: values that are
    not tensors, a wrong number of dimensions, no heads, operands (or `others`) on different
    devices, and tangents.
    """
    check_tensor("q", q)
    dims, device = q.dim(), q.device
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, device)
        if x.dim() != dims or dims not in (3, 4):
            expected = "(T, H, D), or (B, T, H, D) like the others"
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
    """Multiply q by a scale that is a tensor; return q and the scale that is left for q·k.

    Only a tensor that requires a gradient, or (Hq,) with one scale per head, multiplies q here, so
    that autograd computes its gradient. The product is rounded once, to q's dtype.
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
    # With a dimension, scale is not cast to q's dtype, nor is its gradient summed in it.
    return (q * scale.reshape(-1, 1)).to(q.dtype), 1.0


@contextmanager
def naming_rank(comm: Comm) -> Iterator[None]:
    """Append the rank to a ValueError or a TypeError that is raised within."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        rank = f" (rank {comm.rank} of {comm.size})"
        raise kind(str(error).removesuffix(rank) + rank) from None


def check_layouts(**layouts: object) -> None:
    for name, value in layouts.items():
        if not isinstance(value, Layout):
            raise ValueError(f"{name} must be a seqpar.Layout, got {type(value).__name__}")


def check_ranks_of(comm: Comm, **layouts: Geometry) -> None:
    for name, layout in layouts.items():
        if layout.ranks != comm.size:
            expected = f"the group's {comm.size} ranks"
            raise ValueError(f"{name} must be for {expected}, got one for {layout.ranks}")


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            found = f"{x.dtype} with {q.dtype}"
            raise ValueError(f"{name} must be of q's dtype, one of {DTYPES}, got {found}")


def check_operands(q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int) -> None:
    """Refuse all but q (B, tokens, Hq, D), k (B, kv_tokens, Hkv, D), v (…, Hkv, Dv)."""
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
            raise ValueError(f"{name} must have {wanted}, got {x.shape[1]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have q's head dim, {q.shape[3]}, got {k.shape[3]}")


def digest_of_call(
    layout: Geometry, key: Hashable, describe: Callable[[bool], Mapping[str, object]]
) -> CallDigest:
    """Return the digest of `describe(canonical)`, made once; many ranks compare documents only."""
    canonical = layout.ranks <= _MAX_COMPARED_RANKS

    def build() -> CallDigest:
        arguments = dict(describe(canonical))
        if not canonical:
            arguments["layout"] = layout.cu_seqlens.tolist()
            arguments.pop("kv_layout", None)
        return CallDigest.of(arguments)

    digests = layout.derived(("call digests",), lambda: Memo(MAX_KEPT_SETTINGS))
    return digests(key, build)
