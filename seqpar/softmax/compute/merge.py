"""`seqpar.merge`: combine attention over several sets of keys into attention over all of them.

This public function checks its arguments and has a backward. `Partial.merge` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from seqpar.core.dtypes import DTYPES
from seqpar.softmax.compute.partial import Partial, key_weight


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries over disjoint sets of keys.

    Results are merged in the given order, and rounded once at the end. Until then, `out` is in fp32
    (fp64 for fp64), and `lse` is in fp64. Nothing is sent.

    Args:
        outs: one tensor (…, H, Dv) for each set of keys. All have the same shape, device and dtype:
            fp64, fp32, bf16 or fp16. No key may be in two sets.
        lses: the natural-log lse (…, H) of each tensor in `outs`, in fp32 or fp64, as a module with
            `return_lse=True` returns it. If a row has no keys in a set, its out is 0 and its lse is
            −inf in this set.

    Returns:
        out (…, H, Dv), in the outs' dtype, and lse (…, H) in fp32 (fp64 for fp64). Both can be
        differentiated once, with respect to all outs and lses. A row without keys in any set has
        out 0, lse −inf and gradients of 0.

    Raises:
        ValueError: if the arguments do not match each other. The error names the argument.
    """
    _check(outs, lses)
    out, lse = _Merge.apply(len(outs), *outs, *lses)
    return out, lse


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, tensors in (("outs", outs), ("lses", lses)):
        if not isinstance(tensors, Sequence) or not all(isinstance(x, Tensor) for x in tensors):
            raise ValueError(f"{name} must be a sequence of tensors, got {type(tensors).__name__}")
    if not outs:
        raise ValueError("outs must have at least one tensor, got none")
    if len(lses) != len(outs):
        raise ValueError(f"lses must have one tensor per out, {len(outs)}, got {len(lses)}")
    first = outs[0]
    if first.dim() < 2 or first.dtype not in DTYPES:
        actual = f"{tuple(first.shape)} of {first.dtype}"
        raise ValueError(f"outs[0] must be (…, H, Dv) of one of {DTYPES}, got {actual}")
    lse_dtypes = torch.float32, torch.float64
    for name, tensors, shape, dtypes in (
        ("outs", outs, first.shape, (first.dtype,)),
        ("lses", lses, first.shape[:-1], lse_dtypes),
    ):
        for i, x in enumerate(tensors):
            if x.shape != shape or x.dtype not in dtypes or x.device != first.device:
                expected = f"{tuple(shape)} of {' or '.join(map(str, dtypes))} on {first.device}"
                actual = f"{tuple(x.shape)} of {x.dtype} on {x.device}"
                raise ValueError(f"{name}[{i}] must be {expected}, got {actual}")


class _MergeContext(FunctionCtx):
    count: int
    saved_tensors: tuple[Tensor, ...]


class _Merge(torch.autograd.Function):
    """Merge attention over several sets of keys, one set after another, with a backward.

    Let wᵢ be the fraction of the softmax's denominator that the keys of set i contribute. The
    gradients are

        d outᵢ = wᵢ dout
        d lseᵢ = wᵢ (dout·(outᵢ − out) + dlse)
    """

    @staticmethod
    def forward(ctx: _MergeContext, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = tensors[:count], tensors[count:]
        rows = [x.reshape(1, -1, *x.shape[-2:]) for x in outs]
        total = Partial.nothing(rows[0], rows[0])
        for out, lse in zip(rows, lses, strict=True):
            total.merge(slice(None), out, lse.reshape(1, -1, lse.shape[-1]))
        exact, lse = total.out.view(outs[0].shape), total.lse.view(lses[0].shape)
        ctx.count = count
        ctx.save_for_backward(*tensors, exact, lse)
        return exact.to(outs[0].dtype), lse.to(exact.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _MergeContext, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, merged, total = ctx.saved_tensors
        douts, dlses = [], []
        for out, lse in zip(tensors[: ctx.count], tensors[ctx.count :], strict=True):
            weight = key_weight(lse, total).to(merged.dtype)
            exact = dout.to(merged.dtype)
            douts.append((weight * exact).to(out.dtype))
            product = (exact * (out.to(merged.dtype) - merged)).sum(-1) + dlse
            dlses.append((weight[..., 0] * product).to(lse.dtype))
        return None, *douts, *dlses
