"""Call the forward kernels (`forward_kernels.py`) for one block of keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import Shapes, check_int, check_rows, check_type
from .arguments import ACCUMULATORS, check_call, check_launches, check_slopes, score_key
from .configs import Config, padded
from .forward_kernels import flash_forward, flash_merge
from .launching import (
    Known,
    Prepared,
    constants,
    copied,
    dims_of,
    has_descriptor,
    has_host_descriptor,
    head_block,
    ready,
    run,
    scoring,
    signature,
    strides,
)
from .tables import Launch, Launches

_MERGED_ELEMENTS = 2048  # of a program that merges parts: whole tiles spilled 1 to 17 KB


class Results:
    """The queries' side of a forward, which is the same for all blocks of keys.

    It is checked only once. Its fields are the arguments of `forward`.
    """

    def __init__(
        self,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        partial_out: Tensor | None,
        partial_lse: Tensor | None,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> None:
        """Keep the tensors. The kernels write only to the results."""
        results: Any = out, lse, partial_out, partial_lse
        self.key = Known(score_key(scale, softcap, q), signature(q, *results, sinks, slopes))
        self.q, self.results, self.sinks, self.slopes = q, results, sinks, slopes
        self.scale, self.softcap = scale, softcap


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    launches: Launches,
    config: Config,
    *,
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Write the attention of queries over one of several blocks of keys and values.

    q is (B, T, H, D), k (B, Tk, Hkv, D) and v (B, Tk, Hkv, Dv). Tiles with the flag LAST are
    written to `out` (B, T, H, Dv) and `lse` (B, T, H) fp32. `out` may have any dtype of operands,
    and the `sinks` (H,) are part of its denominator. `lse` is natural and does not include the
    sinks. For all other tiles, later calls add the results over further keys. Until then, the
    results of these tiles are in `partial_out` (B, T, H, Dv) fp32 and `partial_lse` (B, T, H) fp64,
    which are None if there are no such tiles. Strides are arbitrary, but rows of `out` and
    `partial_out` are contiguous. With `slopes` (H,) or (B, H) fp32, the slope times the distance of
    the two positions is subtracted from scores (ALiBi).
    """
    results = Results(q, out, lse, partial_out, partial_lse, scale, softcap, sinks, slopes)
    forward_block(results, k, v, launches, config)


def forward_block(
    results: Results, k: Tensor, v: Tensor, launches: Launches, config: Config
) -> None:
    """Compute like `forward`, for one of several blocks of keys and values."""
    check_type("results", results, Results)
    check_launches(launches, config)
    key = config, results.key, signature(k, v)
    call: _Forward | None = launches.prepared.get(key)
    if call is None:
        call = launches.keep(key, _prepare(results, k, v, launches, config))
    if not call.steps:
        return
    q, (out, lse, partial_out, partial_lse), sinks = results.q, results.results, results.sinks
    q, k, v = ready((q, k, v), call.copies) if call.copies else (q, k, v)
    has_partial = partial_out is not None and partial_lse is not None
    partial = (partial_out, partial_lse) if has_partial else call.nothing
    sinks = lse if sinks is None else sinks.contiguous()  # lse: a valid address that is not used
    slopes = lse if results.slopes is None else results.slopes.contiguous()
    parts: tuple[Tensor, ...] = ()
    for step in call.steps:
        launch = step.launch
        if step.merges:
            run(launch, *parts, out, lse, *partial, sinks)
            continue
        described = launch.described(k, v)
        if step.parts > 1:
            parts = empty_partial(q.expand(step.parts, *q.shape), v.shape[-1])
            run(launch, q, k, v, *described, out, lse, *parts, sinks, slopes)
        else:
            run(launch, q, k, v, *described, out, lse, *partial, sinks, slopes)


class _Step(NamedTuple):
    launch: Prepared
    parts: int
    merges: int


class _Forward(NamedTuple):
    """A prepared call of `forward`, without its tensors.

    `copies` says which of q, k and v must be copied first. If no tensor must be copied, `copies` is
    empty. `nothing` is passed in place of the partial results if no tile has a partial result.
    """

    steps: list[_Step]
    copies: tuple[bool, ...]
    nothing: tuple[Tensor, ...]


def _prepare(
    results: Results, k: Tensor, v: Tensor, launches: Launches, config: Config
) -> _Forward:
    q, (out, lse, partial_out, partial_lse), sinks = results.q, results.results, results.sinks
    scale, softcap = results.scale, results.softcap
    shapes = Shapes()
    shapes.check("out", out, "B T H V")  # first, so that errors name a wrong v
    check_call(q, k, v, shapes)
    shapes.check("lse", lse, "B T H", ACCUMULATORS)
    if partial_out is not None:
        shapes.check("partial_out", partial_out, "B T H V", [torch.float32])
        check_rows("partial_out", partial_out)
    if partial_lse is not None:
        shapes.check("partial_lse", partial_lse, "B T H", [torch.float64])
    if sinks is not None:
        shapes.check("sinks", sinks, "H")
    slopes_stride, biased = check_slopes(shapes, results.slopes), results.slopes is not None
    check_rows("out", out)
    copies = copied(config, (q, k, v))
    q, k, v = ready((q, k, v), copies)
    descriptors = all(map(has_descriptor, (q, k, v)))
    from_host = all(map(has_host_descriptor, (k, v)))
    batch, _, heads, dim = q.shape
    value_dim, group, batch_heads = v.shape[-1], heads // k.shape[2], batch * heads
    if partial_out is None or partial_lse is None:  # with the strides of `empty_partial`
        partial_out, partial_lse = (torch.empty(x.shape, device="meta") for x in (out, lse))
    partial_strides = 0, *strides(partial_out, 3), 0, *strides(partial_lse, 3)
    steps, split = [], None
    for launch in launches:
        tile_count = launch.tiles.shape[0]
        grid = (tile_count * batch_heads,)
        flags = {"HAS_PARTIAL": launch.may_continue, "HAS_SINKS": sinks is not None}
        if launch.merges:
            assert split is not None  # by the launch before
            of_tiles = out, lse, partial_out, partial_lse
            merging = _prepare_merge(launch, config, flags, split, of_tiles)
            steps.append(_Step(merging, 1, launch.merges))
            continue
        at = partial_strides
        if launch.parts > 1:
            split = empty_partial(q.to("meta").expand(launch.parts, *q.shape), value_dim)
            at = tuple(s for x in split for s in (x.stride(0), *strides(x[0], 3)))
        described = config.described(launch.has_full, descriptors, from_host)
        flags |= constants(config, dim, value_dim, q.dtype, described) | {
            "HAS_FULL": launch.has_full, "HAS_CUT": launch.has_cut,
            "SOFTCAP": softcap != 0, "FLIP": scale < 0, "ALIBI": biased,
        }  # fmt: skip
        warps, stages = config.resources(launch.has_cut)
        arguments = (
            *launch.arrays, tile_count, heads, group, batch_heads,
            head_block(k, v, group, batch_heads), k.shape[1], *scoring(scale, softcap),
            *(stride for x in (q, k, v) for stride in strides(x, 4)),
            *strides(out, 3), *strides(lse, 3), *at, slopes_stride,
        )  # fmt: skip
        blocks = tuple([config.block_columns, x.shape[3]] for x in (k, v))
        prepared = Prepared(
            flash_forward, grid, q.device, arguments,
            flags | {"num_warps": warps, "num_stages": stages},
            blocks if described == "host" else (),
        )  # fmt: skip
        steps.append(_Step(prepared, launch.parts, 0))
    nothing: tuple[Tensor, ...] = ()
    if launches:
        tiles = launches[0].tiles
        nothing = tiles.view(torch.float32), tiles.view(torch.float64)
    return _Forward(steps, copies if any(copies) else (), nothing)


def _prepare_merge(
    launch: Launch,
    config: Config,
    flags: dict[str, Any],
    parts: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Prepared:
    """Return the launch that merges the parts of tiles into the results.

    A tile is a range of queries. Several programs compute its parts, which are results over some of
    the keys. The parts are (P, B, T, H, Dv) and (P, B, T, H). Finished tiles go to the results
    `out` (B, T, H, Dv) and `lse` (B, T, H). All other tiles go to the running `partial_out` fp32
    and `partial_lse` fp64, of the same shapes. The tensors of the launch are the parts, these four
    results and the sinks (H,).
    """
    batch, _, heads, value_dim = results[0].shape
    tile_count, batch_heads = launch.tiles.shape[0], batch * heads
    arguments = launch.tiles, tile_count, heads, batch_heads, launch.merges
    of_parts = (stride for x in parts for stride in (x.stride(0), *strides(x[0], 3)))
    of_results = (stride for x in results for stride in strides(x, 3))
    rows = min(config.tile_rows, _MERGED_ELEMENTS // padded(value_dim))
    sizes = dims_of("DV", value_dim) | {"ROWS": rows}
    flags = flags | sizes | {"num_warps": 4, "num_stages": 1}
    grid, device = (tile_count * batch_heads, config.tile_rows // rows), launch.tiles.device
    return Prepared(flash_merge, grid, device, (*arguments, *of_parts, *of_results), flags)


def empty_partial(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return uninitialised (out (..., H, Dv) fp32, lse (..., H) fp64) for q (..., H, D).

    The first hop of every tile writes them.
    """
    check_type("q", q, Tensor)
    check_int("value_dim", value_dim, 1)
    shape = q.shape[:-1]
    out = q.new_empty((*shape, value_dim), dtype=torch.float32)
    return out, q.new_empty(shape, dtype=torch.float64)
