"""The softmax primitive: (q, k, v, slices, partial) -> partial, and its backward.

A *partial* (out, lse) summarises attention over a set of keys; partials over disjoint sets merge associatively. What moves
between ranks is a strategy's business; all of them compute with `attend` and `attend_backward` alone.

Legend: B batch, T rows, H heads (Hq of queries, Hkv of keys and values), D head dim (Dv that of values).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from seqpar import tracing
from seqpar.mask import Slices

BACKENDS = {"aten": "aten", "flash_attn": "flash_attn", "reference": "reference", "triton": "fused"}  # and their files

_forced: str | None = None  # a plain global: torch.compile guards on it, and cannot trace a ContextVar


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context every attention call of this process computes its local part with the named backend.

    `"aten"` (ATen's fused kernels, the default), `"triton"` (our kernels, on CUDA), `"flash_attn"` (the package, on CUDA) or
    `"reference"` (plain PyTorch). The choice made in forward holds for the call's backward, wherever that runs. It holds
    for all threads of the process, so they should not choose at the same time. A ValueError names the known backends; a
    call that the backend cannot compute exactly is refused by a ValueError of its own.
    """
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {sorted(BACKENDS)}, got {name!r}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def current_backend() -> str:
    """The name of the backend that a call made now would use."""
    return _forced or "aten"


@cache
def backend(name: str) -> ModuleType:
    """The backend's module, loaded when first used."""
    return import_module(f"seqpar.backends.{BACKENDS[name]}")


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partials and gradient sums are kept in: fp64 for fp64, fp32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Scoring:
    """How scores are made: softcap · tanh(scale · q·k / softcap), or scale · q·k at softcap 0. By which backend, and
    whether its backward must give the same bits each time."""

    scale: float
    softcap: float
    backend: str
    deterministic: bool


@dataclass
class Partial:
    """Attention over the keys seen so far: out (B, T, Hq, Dv) in fp32 (or fp64), and its natural-log lse (B, T, Hq) in fp64.

    In fp32 the roundings of lse alone, one a merge, reach 1.5 times the error of a single kernel's after 16 merges. A row
    that has seen no key has out 0 and lse −inf.
    """

    out: Tensor
    lse: Tensor
    empty: bool = False  # no row has seen a key yet

    @classmethod
    def nothing(cls, q: Tensor, v: Tensor) -> Partial:
        """The partial of queries (B, T, Hq, D) that have seen no key."""
        dtype, rows = accumulator_dtype(q.dtype), q.shape[:-1]
        return cls(
            q.new_zeros((*rows, v.shape[-1]), dtype=dtype), q.new_full(rows, -torch.inf, dtype=torch.float64), empty=True
        )

    def put(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Set rows that have seen no key before."""
        self.out[:, rows], self.lse[:, rows] = out, lse

    def merge(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Add the partial of the same rows (a slice, or indices without repetition) over other keys, in place."""
        mine, mine_lse = self.out[:, rows], self.lse[:, rows]
        total = torch.logaddexp(mine_lse, lse)
        weight = torch.exp(lse - total).nan_to_num_(0.0)  # −inf − −inf, where neither has seen a key
        mine.lerp_(out.to(mine.dtype), weight.to(mine.dtype)[..., None])
        mine_lse.copy_(total)
        if isinstance(rows, Tensor):  # what was changed is a copy
            self.out[:, rows], self.lse[:, rows] = mine, mine_lse

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The output, cast once to `dtype` after the sinks (Hq,) have joined the denominator, and the lse of the keys alone."""
        lse = self.lse.to(self.out.dtype)
        out = self.out if sinks is None else self.out * keys_share(lse, sinks)
        return out.to(dtype), lse


def keys_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """(B, T, Hq, 1) the share of the softmax's denominator that the keys have beside the sinks."""
    return torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]


@dataclass
class Upstream:
    """What backward starts from: dout and the forward's out (B, T, Hq, Dv), lse and perhaps its gradient (B, T, Hq).

    It is that of the whole row, over all keys on all ranks: given it, each key contributes on its own. Rows that travel go
    without `out`: of it only delta is needed.
    """

    dout: Tensor
    out: Tensor | None
    lse: Tensor
    dlse: Tensor | None
    delta: Tensor | None = None  # (B, T, Hq) out·dout − dlse, once something has computed it

    @classmethod
    def of(cls, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Upstream:
        """`out` includes the sinks and `lse` does not. With share g of the keys, dscore = p (g·dout·v − g·dout·out + dlse)."""
        if sinks is not None:
            dout = (dout * keys_share(lse, sinks)).to(out.dtype)
        return cls(dout, out, lse.masked_fill(lse.isneginf(), 0.0), dlse)  # any finite lse serves a row that sees no key

    def with_delta(self) -> Tensor:
        """delta, computed where it is missing."""
        if self.delta is None:
            assert self.out is not None
            delta = (self.out.to(self.lse.dtype) * self.dout).sum(-1)
            self.delta = delta if self.dlse is None else delta - self.dlse
        return self.delta

    def with_out(self) -> Tensor:
        """out; where it is missing, the multiple of dout that has the same product with dout, all that kernels use it for."""
        if self.out is None:
            assert self.delta is not None
            product = self.delta if self.dlse is None else self.delta + self.dlse
            exact = self.dout.to(product.dtype)
            size = torch.linalg.vector_norm(exact, dim=-1)
            unit = exact / size.clamp_min(torch.finfo(size.dtype).tiny)[..., None]
            self.out = (unit * (product / size).masked_fill(size == 0, 0.0)[..., None]).to(self.dout.dtype)
        return self.out


@dataclass
class Gradients:
    """dq (B, T, Hq, D), dk (B, Tk, Hkv, D) and dv (B, Tk, Hkv, Dv), fp32 (or fp64), into which backward accumulates."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def zeros(cls, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        dtype = accumulator_dtype(q.dtype)
        return cls(*(x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v)))

    def beside(self, k: Tensor, v: Tensor) -> Gradients:
        """The same dq, with new dk and dv for another block of keys and values."""
        return Gradients(self.dq, *(x.new_zeros(x.shape, dtype=self.dq.dtype) for x in (k, v)))


def attend(q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, scoring: Scoring) -> None:
    """Continue `partial` (in place) by the queries (B, T, Hq, D) over the keys (B, Tk, Hkv, D) and values of a block."""
    if len(slices) and q.numel():
        with tracing.computing(lambda: slices.area * q.shape[2], q.device) as wanted:
            if wanted:
                backend(scoring.backend).forward(q, k, v, slices, partial, scoring)
        partial.empty = False


def attend_hops(
    q: Tensor,
    blocks: Iterable[Sequence[Tensor]],
    hops: Sequence[Slices],
    scoring: Scoring,
    sinks: Tensor | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, T, Hq, Dv), of `dtype` (q's), and lse (B, T, Hq) over blocks of keys and values that come one after another.

    `hops` has the slices over each block. A backend that knows what is still to come need not keep a partial where none is.
    """
    module, dtype = backend(scoring.backend), dtype or q.dtype
    if q.numel() and hasattr(module, "forward_hops") and tracing.stand_in is None:
        areas = [slices.area * q.shape[2] for slices in hops] if tracing.current is not None else []
        return module.forward_hops(q, tracing.between(blocks, areas, q.device), hops, scoring, sinks, dtype)
    partial: Partial | None = None
    remaining = iter(hops)
    for k, v in blocks:
        partial = partial or Partial.nothing(q, v)
        attend(q, k, v, next(remaining), partial, scoring)
        del k, v  # before the next block is asked for, and the one after it posted: `zip` would hold this one until then
    assert partial is not None
    return partial.finish(sinks, dtype)


def attend_backward(
    up: Upstream, q: Tensor, k: Tensor, v: Tensor, slices: Slices, gradients: Gradients, scoring: Scoring
) -> None:
    """Accumulate (in place) the gradients that flow through these slices."""
    if len(slices) and q.numel():
        with tracing.computing(lambda: slices.area * q.shape[2], q.device) as wanted:
            if wanted:
                backend(scoring.backend).backward(up, q, k, v, slices, gradients, scoring)


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(Hq,) the gradient of the sinks, summed over these rows: −Σ share of the sink · (dout · out)."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    share = torch.sigmoid(sinks.to(lse.dtype) - lse)
    return -(share * delta).flatten(0, -2).sum(0).to(sinks.dtype)
