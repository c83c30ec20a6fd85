"""Merge the results of attention over disjoint keys, for users who split keys themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpar.core.dtypes import DTYPES
from seqpar.softmax.compute.partial import Partial, key_weight


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over all keys, of the same queries' attentions over some of the keys each.

    No key may be in two of them. They are merged in the order given, in fp32 (fp64 for fp64), with
    lse in fp64, and rounded once at the end. Nothing is sent.

    Args:
        outs: tensors (…, H, Dv) of one shape, device and dtype: fp64, fp32, bf16 or fp16.
        lses: for each its (…, H) natural-log lse, fp32 or fp64, as `return_lse` gives it: −inf in
            rows that saw no key, of which out is 0.

    Returns:
        out (…, H, Dv), in the outs' dtype, and lse (…, H) in fp32 (fp64 for fp64), both
        differentiable, once, with respect to all outs and lses. A row that saw no key in any has
        out 0, lse −inf and gradients of 0.

    Raises:
        ValueError: if the arguments do not fit each other. It names the argument.
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
        raise ValueError(f"lses must be as many as outs, {len(outs)}, got {len(lses)}")
    first = outs[0]
    if first.dim() < 2 or first.dtype not in DTYPES:
        found = f"{tuple(first.shape)} of {first.dtype}"
        raise ValueError(f"outs[0] must be (…, H, Dv) of one of {DTYPES}, got {found}")
    alike = first.shape, (first.dtype,)
    of_lse = first.shape[:-1], (torch.float32, torch.float64)
    for i in range(len(outs)):
        for name, x, (shape, dtypes) in (("outs", outs[i], alike), ("lses", lses[i], of_lse)):
            if x.shape != shape or x.dtype not in dtypes or x.device != first.device:
                expected = f"{tuple(shape)} of {' or '.join(map(str, dtypes))} on {first.device}"
                found = f"{tuple(x.shape)} of {x.dtype} on {x.device}"
                raise ValueError(f"{name}[{i}] must be {expected}, got {found}")


class _Merge(torch.autograd.Function):
    """Merge partials in place of each other, and keep just the inputs for backward.

    With wᵢ the share of out i's keys, d outᵢ = wᵢ dout and d lseᵢ = wᵢ (dout·(outᵢ − out) + dlse).
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = tensors[:count], tensors[count:]
        total = Partial.nothing(outs[0][None], outs[0])  # of one batch entry
        for out, lse in zip(outs, lses, strict=True):
            total.merge(slice(None), out[None], lse[None])
        merged, lse = total.out[0].to(outs[0].dtype), total.lse[0]
        ctx.count = count
        ctx.save_for_backward(*tensors, total.out[0], lse)
        return merged, lse.to(total.out.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, merged, total = ctx.saved_tensors
        douts, dlses = [], []
        for out, lse in zip(tensors[: ctx.count], tensors[ctx.count :], strict=True):
            weight = key_weight(lse, total).to(merged.dtype)
            exact = dout.to(merged.dtype)
            douts.append((weight * exact).to(out.dtype))
            product = (exact * (out.to(merged.dtype) - merged)).sum(-1) + dlse
            dlses.append((weight[..., 0] * product).to(lse.dtype))
        return None, *douts, *dlses
