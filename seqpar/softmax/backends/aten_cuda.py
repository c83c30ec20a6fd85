"""ATen's kernels for CUDA: FlashAttention-2 on sm_80 and newer GPUs, cuDNN on sm_90 and sm_100 to
110.

`aten.py` and `kernel_order.py` use these kernels as `VarlenKernel`s, which compute many *segments*
in one call. A segment is a range of query rows and a range of key rows.

cuDNN builds a plan for each new shape and thread, which takes 40 ms to 1.2 s. cuDNN is therefore
used only for calls whose shapes seldom change from step to step (`VarlenCall.dense`). cuDNN's
causal mask begins at the first row and the first key of a segment. Our causal mask ends at the last
row and the last key. The two masks are equal only if a segment has as many keys as queries. cuDNN
therefore computes only causal segments with as many keys as queries, and segments with full masks.

Letters of shapes: there are S segments of L query rows and Lk key rows each, Hq query heads, Hkv KV
heads, the head dim D of q and k, and the head dim Dv of v.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

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

T = TypeVar("T")
# Head dims that backward refuses, except on sm_80 and sm_90 (PyTorch, flash_api.cpp, mha_bwd).
_REFUSED_HEAD_DIMS = range(200, 232, 8)


def computes(q: Tensor) -> bool:
    """Return whether q is on a GPU that runs FlashAttention-2, which is a GPU from sm_80 on."""
    return is_on_cuda(q) and is_recent(device_of(q))


def is_recent(device: torch.device) -> bool:
    return gpu_major(device) >= 8


def gpu_major(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability, such as 9 for sm_90."""
    return gpu_of(device).major


def _forward(
    tables: VarlenTables, options: CallOptions, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    left, right = tables.window
    out, lse, *_ = cuda_attention()(
        q, k, v, tables.cu_q, tables.cu_k, tables.longest_q, tables.longest_k, 0.0, right == 0,
        False, scale=options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse


def _backward(
    tables: VarlenTables, options: CallOptions, rows: BackwardRows
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


def _prepare(function: Callable[..., T]) -> Callable[[VarlenTables, CallOptions], Callable[..., T]]:
    """Turn a function of tables, options and tensors into a field of `VarlenKernel`.

    The returned function takes tables and options, and returns a function of the tensors.
    """
    return lambda tables, options: partial(function, tables, options)


@cache
def _no_random_state(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)


# Its backward has the same bits in each run only under torch's global switch for deterministic
# algorithms. That switch would make operators of other threads raise errors, so the kernel does not
# count as deterministic.
KERNEL = VarlenKernel(_prepare(_forward), _prepare(_backward), max_head_dim=256)

_CUDNN_MAJORS = (9, 10, 11)
# 9.10, the first version with head dims above 128 (PyTorch, sdp_utils.cpp)
_MIN_CUDNN_VERSION = 91000


def _cudnn_forward(
    tables: VarlenTables, options: CallOptions, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = (_by_segments(x, tables) for x in (q, k, v))
    is_causal = tables.window == (-1, 0)
    out, lse, *_ = cudnn_attention()(
        q, k, v, None, True, 0.0, is_causal, False, scale=options.scale
    )
    return _rows(out), lse[..., 0].transpose(0, 1).flatten(1)


def _cudnn_backward(
    tables: VarlenTables, options: CallOptions, rows: BackwardRows
) -> tuple[Tensor, Tensor, Tensor]:
    # To find a plan, torch compares only the strides of q, k and v. Calls with the same strides of
    # q, k and v must therefore have the same strides of dout and out.
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
    return x.transpose(1, 2).flatten(0, 1)


@cache
def cudnn_kernel(major: int) -> VarlenKernel:
    max_head_dim = 256 if major == 9 else 128
    prepare = _prepare(_cudnn_forward), _prepare(_cudnn_backward)
    return VarlenKernel(*prepare, max_head_dim, only_dense=True)


@cache
def load_cudnn(major: int) -> VarlenKernel | str:
    """Return cuDNN's kernel, or the reason why it cannot be used.

    `major` is the first number of the GPU's compute capability.
    """
    if torch.version.hip or major not in _CUDNN_MAJORS:
        return f"cuDNN is not used on {'AMD GPUs' if torch.version.hip else f'sm_{major}x'}"
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # this torch was not built for the installed version of cuDNN
        return f"cuDNN is broken: {error}"
    if version is None or version < _MIN_CUDNN_VERSION:
        return f"cuDNN must be 9.10 or newer, got {version}"
    return cudnn_kernel(major)
