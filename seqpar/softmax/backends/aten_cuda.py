"""Attention on CUDA through ATen: with FlashAttention-2 from sm_80 on, and with cuDNN.

cuDNN computes calls whose segments are equal, on sm_90 and sm_100 to sm_110. It builds a plan for
each new shape and thread, in 40 ms to 1.2 s. It therefore only computes calls whose shapes seldom
change from step to step, `VarlenCall.dense`, and only with keys that ATen's causal mask, which
is aligned at the first row and key, masks like ours.

Legend: S segments of L query rows and Lk key rows each, H heads (Hq of queries, Hkv of keys and
values), D head dim.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from seqpar.core.device_tables import device_of, is_on_cuda
from seqpar.core.torch_private import (
    cuda_attention,
    cuda_attention_backward,
    cudnn_attention,
    cudnn_attention_backward,
)
from seqpar.kernels.gpus import gpu_of
from seqpar.softmax.backends.kernel_operands import pad_heads
from seqpar.softmax.backends.varlen import BackwardRows, VarlenKernel, VarlenTables
from seqpar.softmax.compute.call_options import CallOptions

# By backward, except on an sm_80 or sm_90 (PyTorch, flash_api.cpp, mha_bwd).
_REFUSED_HEAD_DIMS = range(200, 232, 8)


def computes(q: Tensor) -> bool:
    """Return whether FlashAttention-2 runs on the device of q: CUDA, sm_80 and up."""
    return is_on_cuda(q) and is_recent(device_of(q))


def is_recent(device: torch.device) -> bool:
    """Return whether a GPU is an sm_80 or newer."""
    return gpu_major(device) >= 8


def gpu_major(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability."""
    return gpu_of(device).major


def _forward(
    q: Tensor, k: Tensor, v: Tensor, tables: VarlenTables, options: CallOptions
) -> tuple[Tensor, Tensor]:
    left, right = tables.window
    out, lse, *_ = cuda_attention()(
        q, k, v, tables.cu_q, tables.cu_k, tables.longest_q, tables.longest_k, 0.0, right == 0,
        False, scale=options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse


def _backward(
    rows: BackwardRows, tables: VarlenTables, options: CallOptions
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
KERNEL = VarlenKernel(_forward, _backward, max_head_dim=256)

_CUDNN_MAJORS = (9, 10, 11)
_MIN_CUDNN_VERSION = 91000  # 9.10, the first with head dims above 128 (PyTorch, sdp_utils.cpp)


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, tables: VarlenTables, options: CallOptions
) -> tuple[Tensor, Tensor]:
    q, k, v = (_by_segments(x, tables) for x in (q, k, v))
    is_causal = tables.window == (-1, 0)
    out, lse, *_ = cudnn_attention()(
        q, k, v, None, True, 0.0, is_causal, False, scale=options.scale
    )
    return _rows(out), lse[..., 0].transpose(0, 1).flatten(1)


def _cudnn_backward(
    rows: BackwardRows, tables: VarlenTables, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor]:
    # Torch finds a plan by the strides of q, k and v. The other strides must therefore be the same
    # in all calls with these.
    dout, out = rows.dout.contiguous(), rows.out.contiguous()
    dout, q, k, v, out = (_by_segments(x, tables) for x in (dout, rows.q, rows.k, rows.v, out))
    lse = rows.lse.unflatten(1, (len(q), -1)).transpose(0, 1)[..., None].contiguous()
    no_random_state = _no_random_state(q.device)
    dq, dk, dv = cudnn_attention_backward()(
        dout, q, k, v, out, lse, no_random_state, no_random_state, None, None, None,
        q.shape[2], k.shape[2], 0.0, tables.window == (-1, 0), scale=options.scale,
    )  # fmt: skip
    return _rows(dq), _rows(dk), _rows(dv)


def _by_segments(x: Tensor, tables: VarlenTables) -> Tensor:
    """Return rows (S · L, H, D) as a view (S, H, L, D)."""
    return x.unflatten(0, (len(tables.cu_q) - 1, -1)).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """Return x (S, H, L, D) as (S · L, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)


@cache
def cudnn_kernel(major: int) -> VarlenKernel:
    """Return the kernel for GPUs with this first number of the compute capability."""
    max_head_dim = 256 if major == 9 else 128
    return VarlenKernel(_cudnn_forward, _cudnn_backward, max_head_dim, only_dense=True)


@cache
def load_cudnn(major: int) -> VarlenKernel | str:
    """Return the kernel for GPUs with this first number, or the reason why there is none."""
    if torch.version.hip or major not in _CUDNN_MAJORS:
        return f"cuDNN is not used on {'AMD GPUs' if torch.version.hip else f'sm_{major}x'}"
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # its version does not fit this torch
        return f"cuDNN is broken: {error}"
    if version is None or version < _MIN_CUDNN_VERSION:
        return f"cuDNN must be 9.10 or newer, got {version}"
    return cudnn_kernel(major)
