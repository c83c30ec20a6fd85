"""The softmax kernels of the comparison: ours and other libraries'.

A contender is a function of q, k and v (B, T, H, D) that returns out (B, T, H, D), differentiable
unless it says otherwise. A maker returns None where its contender cannot compute the workload.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from seqpar.kernels.flash_attention import configs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.softmax_workloads import Workload
from seqpar.layout.masks.mask import Blocks
from seqpar.softmax.attend import attend, attend_backward, attend_blocks
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(
    work: Workload, backend: str, deterministic: bool = True, variant: str | None = None
) -> Attention:
    """Return our primitive, forward and backward, with a variant of the Triton kernels or none."""
    options = CallOptions(work.dim**-0.5, work.softcap, backend, deterministic)
    blocks = Blocks((work.slices,))

    class Ours(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with configs.variant(variant):
                out, lse = attend_blocks(q, [(k, v)], blocks, options, None)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            q, k, v, out, lse = ctx.saved_tensors
            gradients = PartialGradients.zeros(q, k, v)
            output = OutputGradient.of(dout, None, out, lse, None)
            with configs.variant(variant):
                attend_backward(output, q, k, v, work.slices, gradients, options)
            return tuple(x.to(q.dtype) for x in gradients.results())

    return Ours.apply


def continued(work: Workload, backend: str) -> Attention:
    """Return the forward of a hop that continues a running partial; out is its fp32 part.

    It has no backward.
    """
    options = CallOptions(work.dim**-0.5, 0.0, backend, True)
    partials: list[Partial] = []

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not partials:
            partials.append(Partial.nothing(q, v))
        attend(q, k, v, work.slices, partials[0], options)
        return partials[0].out

    return forward


def sdpa(work: Workload, backend: SDPBackend | None) -> Attention | None:
    """Return torch's scaled_dot_product_attention.

    Masks other than causal and full are dense tensors.
    """
    plain = len(work.cu_seqlens) == 2 and work.kind in ("causal", "full", "ring step")
    if backend is not None and not plain:
        return None
    mask = (
        None if plain else work.seen(torch.arange(work.tokens), torch.arange(work.slices.key_rows))
    )

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with nullcontext() if backend is None else sdpa_kernel(backend):
            causal = plain and work.causal
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, enable_gqa=work.heads != work.kv_heads
            )
        return out.transpose(1, 2)

    return forward


def flex(work: Workload, device: torch.device) -> Attention:
    """Return compiled flex attention with a block mask that is made in advance."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = torch.searchsorted(
        torch.tensor(work.cu_seqlens[1:]), torch.arange(work.tokens), right=True
    ).to(device)
    left = work.window_size[0]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = document[i] == document[j]
        return seen & (i >= j) & (i - j <= left) if left >= 0 else seen & (i >= j)

    mask = None
    if work.causal:
        shape = (None, None, work.tokens, work.slices.key_rows)
        mask = create_block_mask(visible, *shape, device=str(device))
    torch.compiler.reset()  # dynamo stops compiling a function after many shapes
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=work.heads != work.kv_heads).transpose(
            1, 2
        )

    return forward


def flash_attention_2(work: Workload) -> Attention | None:
    """Return FlashAttention-2 of torch: through SDPA, or over documents its varlen function."""
    if len(work.cu_seqlens) == 2 and work.kind != "window":
        return sdpa(work, SDPBackend.FLASH_ATTENTION)
    cu_seqlens, longest = _documents(work)
    left = work.window_size[0] if work.kind == "window" else -1

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, *_ = torch.ops.aten._flash_attention_forward(
            q[0], k[0], v[0], cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False,
            window_size_left=left, window_size_right=0,
        )  # fmt: skip
        return out[None]

    return forward


def flash_attention_4(work: Workload, deterministic: bool = False) -> Attention | None:
    """Return flash-attn-4, if it is installed, with a backward that is deterministic or not."""
    if (
        importlib.util.find_spec("flash_attn") is None
        or importlib.util.find_spec("flash_attn.cute") is None
    ):
        return None
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    window = tuple(None if bound < 0 else bound for bound in work.window_size)
    options = {"causal": work.causal, "window_size": window, "deterministic": deterministic}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(work.cu_seqlens) == 2:
            out = flash_attn_func(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out
        cu_seqlens, longest = _documents(work)
        sides = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        longest_sides = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out = flash_attn_varlen_func(q[0], k[0], v[0], **sides, **longest_sides, **options)
        return (out[0] if isinstance(out, tuple) else out)[None]

    return forward


@cache
def _documents(work: Workload) -> tuple[Tensor, int]:
    """Return cu_seqlens on the GPU, and the longest document."""
    cu_seqlens = torch.tensor(work.cu_seqlens, dtype=torch.int32, device="cuda")
    return cu_seqlens, int(np.diff(work.cu_seqlens).max())
