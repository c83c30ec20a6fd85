"""Attention over slices with a package of FlashAttention, the best that is installed.

One call computes all documents of a hop, in bf16 and fp16 on CUDA. Plain PyTorch computes what the
packages cannot: ALiBi, whose distances they measure in rows and not in positions, and masks whose
rows do not ascend with positions one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.device_tables import device_of
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import reference
from seqpar.softmax.backends.flash_attn_packages import PACKAGES, gpu_major, load_package
from seqpar.softmax.backends.varlen import VarlenKernel
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

MAX_HEAD_DIM = 256
forward_blocks = None  # `attend_blocks` calls `forward` for each block


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Return why these operands cannot be computed, naming the argument, or None."""
    backend = 'the backend "flash_attn"'
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda:
        actual = f"{q.dtype} on {q.device}"
        return f"q must be bf16 or fp16 on a CUDA device for {backend}, got {actual}"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        limit = f"head dims of at most {MAX_HEAD_DIM}"
        actual = f"{q.shape[-1]} and {v.shape[-1]}"
        return f"q and v must have {limit} for {backend}, got {actual}"
    major = gpu_major(q.device)
    reasons = [load_package(name, major) for name in PACKAGES]
    if all(isinstance(reason, str) for reason in reasons):
        return f"{backend} needs a package: {'; '.join(map(str, reasons))}"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, options: CallOptions
) -> None:
    """Merge into `partial` the attention of q (B, T, Hq, D) over k and v; see `attend`."""
    kernel = _kernel(q, v, options, has_dlse=False)
    if kernel is None:
        reference.forward(q, k, v, slices, partial, options)
    else:
        kernel.merge_forward(q, k, v, slices, partial, options)


def backward(
    output: OutputGradient,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    gradients: PartialGradients,
    options: CallOptions,
) -> None:
    """Add to `gradients` what flows through the slices; see `attend_backward`."""
    kernel = _kernel(q, v, options, output.dlse is not None)
    if kernel is None:
        reference.backward(output, q, k, v, slices, gradients, options)
    else:
        kernel.add_gradients(output, q, k, v, slices, gradients, options)


def _kernel(q: Tensor, v: Tensor, options: CallOptions, has_dlse: bool) -> VarlenKernel | None:
    """Return the first package's kernel that computes these scores."""
    major = gpu_major(device_of(q))
    for name in PACKAGES:
        kernel = load_package(name, major)
        if not isinstance(kernel, str) and kernel.takes(q, v, options, has_dlse):
            return kernel
    return None
