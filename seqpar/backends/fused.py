"""Attention over slices with our Triton kernels (`seqpar.kernels.flash_attention`), the backend named "triton".

On CUDA, for bf16, fp16 and fp32; on a CPU only under Triton's interpreter (TRITON_INTERPRET=1), which is for tests. Tables
are built once for each layout and mask, and kept with the slices, as is their copy on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from seqpar.kernels import flash_attention as kernels
from seqpar.mask import Slices

if TYPE_CHECKING:
    from seqpar.attend import Gradients, Partial, Scoring, Upstream

MAX_HEAD_DIM = 256


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why these operands cannot be computed, naming the argument, or None."""
    if q.dtype == torch.float64:
        return 'q must be bf16, fp16 or fp32 for the backend "triton", got torch.float64'
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > MAX_HEAD_DIM:
            return f'{name} must have a head dim of at most {MAX_HEAD_DIM} for the backend "triton", got {x.shape[-1]}'
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f'q must be on a CUDA device for the backend "triton", got {q.device}'
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, scoring: Scoring) -> None:
    """Continue `partial` by the attention of q (B, T, H, D) over k and v."""
    config = kernels.choose("forward", q, v)
    (launches,) = _forward_launches([slices], config, q, continued=True)
    kernels.forward(
        q, k, v, launches, config, out=partial.out, lse=partial.lse, partial_out=partial.out, partial_lse=partial.lse,
        scale=scoring.scale, softcap=scoring.softcap,
    )  # fmt: skip


def forward_hops(
    q: Tensor,
    blocks: Iterable[Sequence[Tensor]],
    hops: Sequence[Slices],
    scoring: Scoring,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """out, of `dtype`, and lse fp32, over one block of keys and values after another; no pass of its own merges them."""
    launches: Iterator[list[kernels.Launch]] | None = None
    for k, v in blocks:
        if launches is None:
            config = kernels.choose("forward", q, v)
            planned = _forward_launches(hops, config, q)
            launches = iter(planned)
            out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
            lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
            needed = any(launch.has_partial and launch.parts == 1 for hop in planned for launch in hop)
            partial_out, partial_lse = kernels.empty_partial(q, v.shape[-1]) if needed else (None, None)
        kernels.forward(
            q, k, v, next(launches), config, out=out, lse=lse, partial_out=partial_out, partial_lse=partial_lse,
            scale=scoring.scale, softcap=scoring.softcap, sinks=sinks,
        )  # fmt: skip
        del k, v  # before the next block is asked for, and the one after it posted
    return out, lse


def backward(up: Upstream, q: Tensor, k: Tensor, v: Tensor, slices: Slices, gradients: Gradients, scoring: Scoring) -> None:
    """Add to `gradients` what flows through the slices."""
    if up.delta is None:
        assert up.out is not None
        up.delta = kernels.delta(up.out, up.dout, up.dlse)
    operands = q, k, v, up.dout, up.lse, up.delta
    options = {"scale": scoring.scale, "softcap": scoring.softcap}
    config = kernels.choose("backward_kv", q, v)
    launches = _backward_launches(slices, config, q.device, transposed=True)
    dq = None if scoring.deterministic else gradients.dq
    kernels.backward_kv(*operands, launches, config, dk=gradients.dk, dv=gradients.dv, dq=dq, **options)
    if scoring.deterministic:
        config = kernels.choose("backward_q", q, v)
        launches = _backward_launches(slices, config, q.device, transposed=False)
        kernels.backward_q(*operands, launches, config, dq=gradients.dq, **options)


def _forward_launches(
    hops: Sequence[Slices], config: kernels.Config, q: Tensor, continued: bool = False
) -> list[list[kernels.Launch]]:
    heads = q.shape[0] * q.shape[2]
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 0
    programs = multiprocessors // heads  # that many tiles of every head fill the device

    def build() -> tuple[list[list[kernels.Launch]], Sequence[Slices]]:
        separate = config.cut is not None
        launches = kernels.forward_launches(hops, config.rows, config.columns, q.device, separate, continued, programs)
        return launches, hops  # kept alive, since the key holds their identities

    return _kept(hops[0], ("forward", config, q.device, continued, programs, *map(id, hops)), build)[0]


def _backward_launches(slices: Slices, config: kernels.Config, device: torch.device, transposed: bool) -> list[kernels.Launch]:
    def build() -> list[kernels.Launch]:
        return kernels.backward_launches(slices, config.rows, config.columns, device, config.cut is not None, transposed)

    return _kept(slices, ("backward", config, device, transposed), build)


def _kept(slices: Slices, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
    """What `build` makes, made once for these slices."""
    if key not in slices.lowered:
        slices.lowered[key] = build()
    return slices.lowered[key]
