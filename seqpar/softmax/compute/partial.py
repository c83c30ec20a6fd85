"""Partials and gradients: what the softmax primitive reads and writes.

Legend: B batch, T query rows, Tk key rows, H heads (Hq of queries, Hkv of keys and values), D head
dim (Dv of values).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqpar.core.dtypes import accumulator_dtype
from seqpar.softmax.compute.stable_math import logaddexp_anywhere, sigmoid_anywhere

_FEW_ROWS = 1024  # of which a copy takes little memory


@dataclass
class Partial:
    """The attention of some queries over the keys seen so far, into which others can be merged.

    Attributes:
        out: (B, T, Hq, Dv) in fp32 (fp64 for fp64).
        lse: (B, T, Hq), natural log, in fp64. In fp32 the roundings of lse alone, one a merge,
            reach 1.5 times the error of a single kernel's after 16 merges.
        empty: whether no row has seen a key yet.
        anchored: whether merging gives a row the same bits wherever it is among other rows.

    A row that has seen no key has out 0 and lse −inf.
    """

    out: Tensor
    lse: Tensor
    empty: bool = False
    anchored: bool = False

    @classmethod
    def nothing(
        cls, q: Tensor, v: Tensor, out: Tensor | None = None, anchored: bool = False
    ) -> Partial:
        """Make the partial of queries (B, T, Hq, D) that have seen no key.

        `out` is overwritten and becomes its out, if it is of the accumulator's dtype.
        """
        dtype, rows = accumulator_dtype(q.dtype), q.shape[:-1]
        if out is not None and out.dtype == dtype:
            out.zero_()
        else:
            out = q.new_zeros((*rows, v.shape[-1]), dtype=dtype)
        lse = q.new_full(rows, -torch.inf, dtype=torch.float64)
        return cls(out, lse, empty=True, anchored=anchored)

    def of_heads(self, heads: slice) -> Partial:
        """Return a view of the partial of some heads."""
        return replace(self, out=self.out[:, :, heads], lse=self.lse[:, :, heads])

    def put(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Set rows that have seen no key before."""
        self.out[:, rows], self.lse[:, rows] = out, lse

    def merge(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Add the partial of the same rows over other keys, in place.

        `rows` is a slice, or indices without repetition.
        """
        if isinstance(rows, Tensor):
            old_out, old_lse = (x.index_select(1, rows) for x in (self.out, self.lse))
        else:
            old_out, old_lse = self.out[:, rows], self.lse[:, rows]
        # Only the difference needs fp64. A row that neither has a key for keeps its out of 0: its
        # weight is 0, not NaN, so that a weight is NaN only if an lse is.
        weight = torch.empty_like(lse, dtype=old_out.dtype)
        torch.sub(lse, _finite(old_lse), out=weight)
        out = out if out.dtype == old_out.dtype else out.to(old_out.dtype)
        if self.anchored:
            weight = sigmoid_anywhere(weight).unsqueeze(-1)
            old_out.mul_(1 - weight).add_(out * weight)
            old_lse.copy_(logaddexp_anywhere(old_lse, lse))
        else:
            old_out.lerp_(out, weight.sigmoid_().unsqueeze(-1))
            torch.logaddexp(old_lse, lse, out=old_lse)
        if isinstance(rows, Tensor):
            self.out.index_copy_(1, rows, old_out)
            self.lse.index_copy_(1, rows, old_lse)

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the output, cast once to `dtype`, and the lse of the keys alone.

        The sinks (Hq,) join the output's denominator.
        """
        lse = self.lse.to(self.out.dtype)
        if sinks is None:
            return self.out.to(dtype), lse
        return _scaled(self.out, key_fraction(lse, sinks, self.anchored), dtype), lse


@dataclass
class OutputGradient:
    """What backward starts from: the forward's result and the gradients of it.

    The result is the final one, over all keys on all ranks. Given it, the gradients that flow
    through each key can be computed without the other keys.

    Attributes:
        dout: (B, T, Hq, Dv).
        out: like dout; or None for rows that travel, since backward needs only their delta.
        lse: (B, T, Hq), finite everywhere.
        dlse: (B, T, Hq), or None if lse has no gradient.
        delta: (B, T, Hq), out·dout − dlse, once something has computed it.
        prepared: what a backend keeps from one block of keys to the next.
    """

    dout: Tensor
    out: Tensor | None
    lse: Tensor
    dlse: Tensor | None
    delta: Tensor | None = None
    prepared: Any = None

    @classmethod
    def of(
        cls,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        anchored: bool = False,
    ) -> OutputGradient:
        """Make it from the forward's out, which includes the sinks, and lse, which does not.

        With fraction g of the denominator being the keys', a score's gradient is
        p (g·dout·v − g·dout·out + dlse). So the sinks scale dout.
        """
        if sinks is not None:
            dout = _scaled(dout, key_fraction(lse, sinks, anchored), out.dtype)
        # Any finite value serves a row that sees no key.
        finite = lse.nan_to_num(torch.nan, torch.inf, 0.0)
        return cls(dout, out, finite, dlse)

    def ensure_delta(self) -> Tensor:
        """Return delta, computed where it is missing."""
        if self.delta is None:
            assert self.out is not None
            delta = _products(self.out, self.dout, self.lse.dtype)
            self.delta = delta if self.dlse is None else delta - self.dlse
        return self.delta

    def ensure_out(self) -> Tensor:
        """Return out, or where it is missing, a tensor that kernels can use in its place.

        That is the multiple of dout whose product with dout is out·dout: kernels need out only for
        this product. dout is first divided by its largest element, since in fp32 the squares of
        numbers below 1e-23 are 0, and those of numbers above 1e19 infinite.
        """
        if self.out is None:
            assert self.delta is not None
            product = self.delta if self.dlse is None else self.delta + self.dlse
            dout = self.dout.to(product.dtype)
            largest = dout.abs().amax(-1, keepdim=True)
            direction = dout / largest  # its length is 1 to √Dv
            multiple = product[..., None] / largest / direction.square().sum(-1, keepdim=True)
            out = (direction * multiple).masked_fill(largest == 0, 0.0)
            self.out = out.to(self.dout.dtype)
        return self.out


@dataclass
class PartialGradients:
    """dq (B, T, Hq, D), dk (B, Tk, Hkv, D) and dv (B, Tk, Hkv, Dv), into which backward adds.

    They are fp32 (fp64 for fp64).
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def zeros(cls, q: Tensor, k: Tensor, v: Tensor) -> PackedGradients:
        """Return gradients of 0."""
        batch, rows, heads, dim = k.shape
        dq = q.new_zeros(q.shape, dtype=accumulator_dtype(q.dtype))
        return PackedGradients.over(dq, (rows, batch, heads), [dim, v.shape[3]])


@dataclass
class PackedGradients(PartialGradients):
    """Gradients of which dk and dv lie side by side, so that they are sent and added as one.

    Attributes:
        packed: (Tk, B, Hkv, D + Dv), of which dk and dv are views.
    """

    packed: Tensor

    @classmethod
    def over(cls, dq: Tensor, shape: tuple[int, int, int], dims: list[int]) -> PackedGradients:
        """Return those of `shape` (Tk, B, Hkv) and `dims` (D, Dv), 0, with this dq."""
        packed = dq.new_zeros((*shape, sum(dims)))
        dk, dv = packed.transpose(0, 1).split_with_sizes(dims, -1)
        return cls(dq, dk, dv, packed)

    def of_block(self, rows: int) -> PackedGradients:
        """Return gradients with this dq, and 0 for a block of so many other key rows."""
        _, batch, heads, _ = self.packed.shape
        return self.over(self.dq, (rows, batch, heads), [self.dk.shape[3], self.dv.shape[3]])


def cast_each(gradients: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients in a dtype, contiguous, freeing each before the next is cast.

    No two share memory, as results of an operator must not.
    """
    remaining = list(gradients)
    del gradients
    contiguous = torch.contiguous_format
    cast = lambda x: x.to(dtype, memory_format=contiguous).contiguous()  # noqa: E731
    return [cast(remaining.pop(0)) for _ in range(len(remaining))]


def key_weight(lse: Tensor, total: Tensor) -> Tensor:
    """Return (…, 1): the share of some keys, of this lse, in a softmax of this `total` lse.

    It is 0 in rows that have no keys at all, and NaN in rows whose lse is NaN.
    """
    return torch.exp(lse - _finite(total))[..., None]


def key_fraction(lse: Tensor, sinks: Tensor, anchored: bool = False) -> Tensor:
    """Return (B, T, Hq, 1): the keys' fraction of the softmax's denominator, which has the sinks.

    lse is (B, T, Hq), of the keys alone, and sinks (Hq,). Where both are −∞ it is 1: a row without
    keys has out 0 in any case.
    """
    difference = _finite(lse) - sinks.to(lse.dtype)
    return (sigmoid_anywhere if anchored else torch.sigmoid)(difference)[..., None]


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return (Hq,): the gradient of the sinks, summed over these rows.

    It is −Σ f · (dout · out), where f is the sink's fraction of the denominator. dout and out are
    (B, T, Hq, Dv), lse (B, T, Hq), of the keys alone.
    """
    delta = _products(dout, out, lse.dtype)
    sink_fraction = torch.sigmoid(sinks.to(lse.dtype) - _finite(lse))
    return -(sink_fraction * delta).flatten(0, -2).sum(0).to(sinks.dtype)


def _finite(lse: Tensor) -> Tensor:
    """Return lse with the least finite number for the −∞ of rows without keys."""
    return lse.clamp_min(torch.finfo(lse.dtype).min)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x · factor, rounded once, to a dtype, with no copy that is larger than the result."""
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def _products(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, T, H): x·y of each row and head, computed in a dtype; x and y are (B, T, H, D).

    Of long tensors the copies in that dtype are of a quarter at a time.
    """
    result = x.new_empty(x.shape[:-1], dtype=dtype)
    step = max(_FEW_ROWS, -(-x.shape[1] // 4))
    for first in range(0, x.shape[1], step):
        rows = slice(first, first + step)
        torch.sum(x[:, rows].to(dtype) * y[:, rows], -1, out=result[:, rows])
    return result
