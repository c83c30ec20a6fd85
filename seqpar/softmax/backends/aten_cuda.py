"""Attention over slices with ATen's FlashAttention-2, on CUDA from sm_80 on."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from seqpar.core.device_tables import device_of, is_on_cuda
from seqpar.core.torch_private import cuda_attention, cuda_attention_backward
from seqpar.kernels.gpus import gpu_of
from seqpar.softmax.backends.kernel_operands import pad_heads
from seqpar.softmax.backends.varlen import BackwardRows, VarlenKernel
from seqpar.softmax.backends.varlen_calls import SegmentTables
from seqpar.softmax.compute.call_options import CallOptions

# By backward, except on an sm_80 or sm_90 (PyTorch, flash_api.cpp, mha_bwd).
_REFUSED_HEAD_DIMS = range(200, 232, 8)


def computes(q: Tensor) -> bool:
    """Return whether FlashAttention-2 runs on the device of q: CUDA, sm_80 and up."""
    return is_on_cuda(q) and is_recent(device_of(q))


def is_recent(device: torch.device) -> bool:
    """Return whether a GPU is an sm_80 or newer."""
    return gpu_of(device).major >= 8


def _forward(
    q: Tensor, k: Tensor, v: Tensor, tables: SegmentTables, options: CallOptions
) -> tuple[Tensor, Tensor]:
    left, right = tables.window
    out, lse, *_ = cuda_attention()(
        q, k, v, tables.cu_q, tables.cu_k, tables.longest_q, tables.longest_k, 0.0, right == 0,
        False, scale=options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse


def _backward(
    rows: BackwardRows, tables: SegmentTables, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = tables.window
    dout, q, k, v, out = operands = rows.dout, rows.q, rows.k, rows.v, rows.out
    if q.shape[-1] in _REFUSED_HEAD_DIMS:
        dout, q, k, v, out = (pad_heads(x, _REFUSED_HEAD_DIMS.stop) for x in operands)
    no_random_state = _no_random_state(q.device)
    dq, dk, dv = cuda_attention_backward()(
        dout, q, k, v, out, rows.lse, tables.cu_q, tables.cu_k,
        tables.longest_q, tables.longest_k, 0.0, right == 0, no_random_state, no_random_state,
        scale=options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return dq, dk, dv


@cache
def _no_random_state(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)


# It gives the same bits each time only under torch's switch for all threads of the process, which
# makes operators of other threads raise.
KERNEL = VarlenKernel(
    _forward,
    _backward,
    max_head_dim=256,
    softcap=False,
    lse_gradient=False,
    deterministic=False,
)
