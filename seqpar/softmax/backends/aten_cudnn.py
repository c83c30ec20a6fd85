"""Attention with cuDNN through ATen, on sm_90 and sm_100 to sm_110, where segments are equal.

cuDNN builds a plan for each new shape and thread, in 40 ms to 1.2 s. It therefore only computes
calls whose shapes seldom change from step to step, `VarlenCall.is_dense`, and only with keys that
ATen's causal mask, which is aligned at the first row and key, masks like ours.

Legend: S segments of L query rows and Lk key rows each, H heads (Hq of queries, Hkv of keys and
values), D head dim.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from seqpar.core.torch_private import cudnn_attention, cudnn_attention_backward
from seqpar.softmax.backends.varlen import BackwardRows, VarlenKernel
from seqpar.softmax.backends.varlen_calls import SegmentTables
from seqpar.softmax.compute.call_options import CallOptions

_MAJORS = (9, 10, 11)
_MIN_VERSION = 91000  # 9.10, the first with head dims above 128 (PyTorch, sdp_utils.cpp)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, tables: SegmentTables, options: CallOptions
) -> tuple[Tensor, Tensor]:
    q, k, v = (_by_segments(x, tables) for x in (q, k, v))
    is_causal = tables.window == (-1, 0)
    out, lse, *_ = cudnn_attention()(
        q, k, v, None, True, 0.0, is_causal, False, scale=options.scale
    )
    return _rows(out), lse[..., 0].transpose(0, 1).flatten(1)


def _backward(
    rows: BackwardRows, tables: SegmentTables, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor]:
    # Torch finds a plan by the strides of q, k and v. The other strides must therefore be the same
    # in all calls with these.
    dout, out = rows.dout.contiguous(), rows.out.contiguous()
    dout, q, k, v, out = (_by_segments(x, tables) for x in (dout, rows.q, rows.k, rows.v, out))
    lse = rows.lse.unflatten(1, (len(q), -1)).transpose(0, 1)[..., None].contiguous()
    no_random_state = torch.empty(0, dtype=torch.int64, device=q.device)
    dq, dk, dv = cudnn_attention_backward()(
        dout, q, k, v, out, lse, no_random_state, no_random_state, None, None, None,
        q.shape[2], k.shape[2], 0.0, tables.window == (-1, 0), scale=options.scale,
    )  # fmt: skip
    return _rows(dq), _rows(dk), _rows(dv)


def _by_segments(x: Tensor, tables: SegmentTables) -> Tensor:
    """Return rows (S · L, H, D) as a view (S, H, L, D)."""
    return x.unflatten(0, (len(tables.cu_q) - 1, -1)).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """Return x (S, H, L, D) as (S · L, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)


@cache
def kernel(major: int) -> VarlenKernel:
    """Return the kernel for GPUs with this first number of the compute capability."""
    return VarlenKernel(
        _forward,
        _backward,
        max_head_dim=256 if major == 9 else 128,
        softcap=False,
        lse_gradient=False,
        deterministic=False,
        only_dense=True,
    )


@cache
def load_cudnn(major: int) -> VarlenKernel | str:
    """Return the kernel for GPUs with this first number, or the reason why there is none."""
    if torch.version.hip or major not in _MAJORS:
        return f"cuDNN is not used on {'AMD GPUs' if torch.version.hip else f'sm_{major}x'}"
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # its version does not fit this torch
        return f"cuDNN is broken: {error}"
    if version is None or version < _MIN_VERSION:
        return f"cuDNN must be 9.10 or newer, got {version}"
    return kernel(major)
