"""The backend "triton": attention with our own Triton kernels.

The kernels are in `seqpar.kernels.flash_attention`. They run on CUDA, for bf16, fp16 and fp32. On
CPUs they run only in Triton's interpreter (TRITON_INTERPRET=1), for tests. The tables that kernels
read are made once per layout and mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.attention.backend import triton_refusal
from seqpar.core.device_tables import device_of, on_device, rehearsing
from seqpar.core.memo import LOCAL, Memo
from seqpar.kernels import flash_attention as kernels
from seqpar.kernels.gpus import gpu_of
from seqpar.layout.masks.mask import Blocks, Slices
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

_CPU = torch.device("cpu")
refusal = triton_refusal


def forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, options: CallOptions
) -> None:
    config = _choose("forward", q, v)
    derived, splits = slices.derived, not options.rank_invariant
    (launches,), _ = _forward_launches([slices], derived, config, q, continued=True, splits=splits)
    if rehearsing():
        return
    kernels.forward(
        q, k, v, launches, config, out=partial.out, lse=partial.lse, partial_out=partial.out,
        partial_lse=partial.lse, scale=options.scale, softcap=options.softcap,
        slopes=_slopes(options),
    )  # fmt: skip


def forward_blocks(
    q: Tensor,
    blocks: Iterable[Sequence[Tensor]],
    slices_of_blocks: Blocks,
    options: CallOptions,
    sinks: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention (out, lse) of q over all blocks; see `attend_blocks`."""
    remaining: Iterator[kernels.Launches] | None = None
    scores = options.scale, options.softcap
    for k, v in blocks:
        if remaining is None:
            config = _choose("forward", q, v)
            planned, some_continue = _forward_launches(
                slices_of_blocks.slices, slices_of_blocks.derived, config, q
            )
            remaining = iter(planned)
            out, lse = into or (
                q.new_empty((*q.shape[:-1], v.shape[-1])),
                q.new_empty(q.shape[:-1], dtype=torch.float32),
            )
            partial_out, partial_lse = None, None
            if some_continue:
                partial_lse = q.new_empty(q.shape[:-1], dtype=torch.float64)
                accumulates = out.dtype == torch.float32  # then out itself is used for the partial
                partial_out = out if accumulates else torch.empty_like(out, dtype=torch.float32)
            results = kernels.Results(
                q, out, lse, partial_out, partial_lse, *scores, sinks, _slopes(options)
            )
        if (launches := next(remaining)) and not rehearsing():
            kernels.forward_block(results, k, v, launches, config)
        del k, v  # frees this block before the next one arrives and another exchange is posted
    return out, lse


def backward(
    output: OutputGradient,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    gradients: PartialGradients,
    options: CallOptions,
) -> None:
    if rehearsing():
        _backward_launches(slices, _backward_configs(q, v, options), q.device)
        return
    prepared = output.prepared
    if (
        not isinstance(prepared, _Backward)
        or prepared.queries.q is not q
        or prepared.queries.dq is not gradients.dq
    ):
        prepared = output.prepared = _Backward.of(output, q, gradients.dq, options)
    launches = _backward_launches(slices, prepared.configs, q.device)
    kernels.backward(prepared.queries, k, v, *launches, dk=gradients.dk, dv=gradients.dv)


def _slopes(options: CallOptions) -> Tensor | None:
    """Return ALiBi's slopes with the shape that the kernels read, (Hq,) or (B, Hq), or None."""
    slopes = options.slopes
    return slopes[0] if slopes is not None and len(slopes) == 1 else slopes


class _Backward(NamedTuple):
    """The queries and the configurations of kernels that one backward uses for all blocks of keys.

    A backward runs one kernel or two kernels. A single kernel adds to dq, dk and dv. Of two
    kernels, the first kernel adds to dk and dv, and the second kernel adds to dq.
    """

    queries: kernels.Queries
    configs: tuple[kernels.Config, ...]

    @classmethod
    def of(cls, output: OutputGradient, q: Tensor, dq: Tensor, options: CallOptions) -> _Backward:
        if output.delta is None:
            assert output.out is not None
            output.delta = kernels.delta(output.out, output.dout, output.dlse)
        dout, scores = output.dout, (options.scale, options.softcap)
        operands = q, dout, output.lse, output.delta, dq
        queries = kernels.Queries(*operands, *scores, _slopes(options))
        return cls(queries, _backward_configs(q, dout, options))


def _choose(kind: str, q: Tensor, v: Tensor) -> kernels.Config:
    return kernels.choose(kind, q, v, device_of(q))


def _backward_configs(q: Tensor, v: Tensor, options: CallOptions) -> tuple[kernels.Config, ...]:
    kinds = ("backward_kv", "backward_q") if options.deterministic else ("backward_kv",)
    return tuple(_choose(kind, q, v) for kind in kinds)


def _forward_launches(
    blocks: Sequence[Slices],
    derived: Memo,
    config: kernels.Config,
    q: Tensor,
    continued: bool = False,
    splits: bool = True,
) -> tuple[list[kernels.Launches], bool]:
    """Return the launches for each block of keys, and whether results are stored between launches.

    A result is stored if a later launch continues it with further keys. With `splits`, several
    programs of a launch may compute the same queries, each over some of the keys. The results of
    these programs do not count as stored.
    """
    heads, device = q.shape[0] * q.shape[2], device_of(q)
    key = config, device, continued, heads, splits

    def build() -> tuple[list[kernels.Launches], bool]:
        programs = 0  # the number of tiles, per head and batch entry, that use all of the device
        if device.type == "cuda" and splits:
            programs = gpu_of(device).processors // heads
        most_runs = blocks[0].most_runs
        planned = kernels.forward_launches(
            list(blocks), config, _CPU, continued, 0 if most_runs else programs, most_runs
        )
        some_continue = any(
            x.has_partial and x.parts == 1 for launches in planned for x in launches
        )
        return planned, some_continue

    def place() -> tuple[list[kernels.Launches], bool]:
        planned, some_continue = derived(("forward tables", *key), build)
        return [_placed(launches, device) for launches in planned], some_continue

    return place() if rehearsing() else derived((LOCAL, "forward launches", *key), place)


def _backward_launches(
    slices: Slices, configs: tuple[kernels.Config, ...], device: torch.device
) -> tuple[kernels.Launches | kernels.Config, ...]:
    """Return the launches and the configuration of each kernel of a backward.

    The first kernel loops over the queries of a range of keys. If there is a second kernel, it
    loops over the keys of a range of queries.
    """

    def build() -> list[kernels.Launches]:
        return [
            kernels.backward_launches(slices, config, _CPU, transposed, slices.most_runs)
            for config, transposed in zip(configs, (True, False), strict=False)
        ]

    def place() -> tuple[kernels.Launches | kernels.Config, ...]:
        planned = slices.derived(("backward tables", configs), build)
        placed = [_placed(launches, device) for launches in planned]
        return tuple(chain.from_iterable(zip(placed, configs, strict=True)))

    if rehearsing():
        return place()
    return slices.derived((LOCAL, "backward launches", configs, device), place)


def _placed(launches: kernels.Launches, device: torch.device) -> kernels.Launches:
    if device.type == "cpu" and not rehearsing():
        return launches
    return launches.placed(lambda table: on_device(table, device))
