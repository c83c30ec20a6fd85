"""Call the backward kernels (`backward_kernels.py`), which compute delta and the gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..checks import Shapes, check_rows, check_type
from .arguments import check_backward, check_launches, check_slopes, score_key
from .backward_kernels import flash_backward_kv, flash_backward_q, flash_delta
from .configs import Config
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
from .merge_hops import kept_call
from .tables import Launches

_DELTA_CONFIG = Config(64, 0, 4, 1)


class Queries:
    """The queries' side of a backward, which is the same for all blocks of keys.

    It is checked only once. Its fields are the arguments of `backward_kv` and `backward_q`.
    """

    def __init__(
        self,
        q: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor | None,
        scale: float,
        softcap: float = 0.0,
        slopes: Tensor | None = None,
    ) -> None:
        """Keep the tensors. The kernels write only to dq, if it is given."""
        for name, x in (("lse", lse), ("delta", delta)):
            check_type(name, x, Tensor)
        lse, delta = lse.contiguous(), delta.contiguous()
        self.key = Known(score_key(scale, softcap, q), signature(q, dout, lse, delta, dq, slopes))
        self.q, self.dout, self.lse, self.delta, self.dq = q, dout, lse, delta, dq
        self.scale, self.softcap, self.slopes = scale, softcap, slopes


def backward(
    queries: Queries,
    k: Tensor,
    v: Tensor,
    launches: Launches,
    config: Config,
    q_launches: Launches | None = None,
    q_config: Config | None = None,
    *,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add to dk and dv like `backward_kv`, and to dq like `backward_q` with `q_launches`.

    Without `q_launches`, the kernel of dk and dv adds to dq too. The arguments are checked once for
    both kernels.
    """
    check_type("queries", queries, Queries)
    check_launches(launches, config)
    if q_launches is not None:
        check_launches(q_launches, q_config, "q_launches", "q_config")
    key = config, q_launches, q_config, queries.key, signature(k, v, dk, dv)
    calls: _Calls | None = launches.prepared.get(key)
    dq = queries.dq if q_launches is None else None
    if calls is None:
        kv = _prepare("kv", queries, k, v, launches, config, {"dq": dq, "dk": dk, "dv": dv})
        of_queries = _Backward([], ())
        if q_launches is not None and q_config is not None:
            gradients = {"dq": queries.dq}
            of_queries = _prepare("q", queries, k, v, q_launches, q_config, gradients)
        calls = launches.keep(key, (kv, of_queries))
    # without dq, dk is a valid address that is not used
    _launch("kv", calls[0], queries, k, v, (dk if dq is None else dq, dk, dv))
    _launch("q", calls[1], queries, k, v, (queries.dq,))


def backward_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    launches: Launches,
    config: Config,
    *,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    softcap: float = 0.0,
    dq: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Add gradients to dk (B, Tk, Hkv, D) and dv (B, Tk, Hkv, Dv), in fp32.

    A table (`tables.py`) lists the blocks of queries and keys whose attention is computed. The
    table is transposed: its rows are keys, and its columns are queries. q is (B, T, H, D), k (B,
    Tk, Hkv, D), v (B, Tk, Hkv, Dv) and dout (B, T, H, Dv). lse and `delta` (B, T, H) fp32 are those
    of a query over all of its keys. lse must be finite, and may have any value for a row without
    keys. If dq (B, T, H, D) fp32 is given, the kernel adds the gradients of queries to dq
    atomically. Strides are arbitrary, but rows of gradients are contiguous. `slopes` are as in
    `forward`.
    """
    queries = Queries(q, dout, lse, delta, dq, scale, softcap, slopes)
    backward(queries, k, v, launches, config, dk=dk, dv=dv)


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    launches: Launches,
    config: Config,
    *,
    dq: Tensor,
    scale: float,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> None:
    """Add the gradients through a table to dq (B, T, H, D) fp32.

    The rows of the table are queries. See `backward_kv` for the other arguments.
    """
    check_launches(launches, config)
    queries = Queries(q, dout, lse, delta, dq, scale, softcap, slopes)
    key = config, queries.key, signature(k, v)
    call: _Backward | None = launches.prepared.get(key)
    if call is None:
        call = launches.keep(key, _prepare("q", queries, k, v, launches, config, {"dq": dq}))
    _launch("q", call, queries, k, v, (dq,))


class _Backward(NamedTuple):
    """A prepared call, without its tensors.

    `copies` says which of q, k, v and dout must be copied first, and is empty if none must be.
    """

    launches: list[Prepared]
    copies: tuple[bool, ...]


_Calls = tuple[_Backward, _Backward]  # the call of keys, and the call of queries


def _launch(
    kind: str,
    call: _Backward,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    added: tuple[Any, ...],
) -> None:
    """Launch one of the two kernels over a table. It adds to the gradients `added`."""
    q, dout, lse, delta = queries.q, queries.dout, queries.lse, queries.delta
    # without slopes, lse is a valid address that is not used
    slopes = lse if queries.slopes is None else queries.slopes.contiguous()
    if call.copies:
        q, k, v, dout = ready((q, k, v, dout), call.copies)
    walked = (q, dout) if kind == "kv" else (k, v)
    for launch in call.launches:
        run(launch, q, k, v, dout, *launch.described(*walked), lse, delta, *added, slopes)


def _prepare(
    kind: str,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    launches: Launches,
    config: Config,
    gradients: dict[str, Any],
) -> _Backward:
    operands, lse = (queries.q, k, v, queries.dout), queries.lse
    scale, softcap = queries.scale, queries.softcap
    shapes = check_backward(operands, lse, queries.delta)
    slopes_stride = check_slopes(shapes, queries.slopes)
    sizes = {"dq": "B T H D", "dk": "B K G D", "dv": "B K G V"}
    flags: dict[str, Any] = {"SOFTCAP": softcap != 0, "FLIP": scale < 0}
    flags["ALIBI"] = queries.slopes is not None
    if kind == "kv":
        flags["REDUCE_DQ"] = gradients["dq"] is not None
    given = {
        name: x for name, x in gradients.items() if name != "dq" or x is not None or kind == "q"
    }
    for name, x in given.items():
        shapes.check(name, x, sizes[name], [torch.float32])
        check_rows(name, x)
    copies = copied(config, operands)
    q, k, v, dout = ready(operands, copies)
    descriptors = all(map(has_descriptor, (q, k, v, dout)))
    batch, dim, value_dim, group = q.shape[0], q.shape[3], v.shape[3], q.shape[2] // k.shape[2]
    if kind == "kv":
        kernel, walked, heads, sharing = flash_backward_kv, (q, dout), k.shape[2], 1
    else:
        kernel, walked, heads, sharing = flash_backward_q, (k, v), q.shape[2], group
    batch_heads, from_host = batch * heads, all(map(has_host_descriptor, walked))
    added = [given[name] if name in given else given["dk"] for name in gradients]
    prepared = []
    for launch in launches:
        tile_count = launch.tiles.shape[0]
        described = config.described(launch.has_full, descriptors, from_host)
        warps, stages = config.resources(launch.has_cut)
        arguments = (
            *launch.arrays, tile_count, heads, group, batch_heads,
            head_block(*walked, sharing, batch_heads), walked[0].shape[1],
            *scoring(scale, softcap), float(scale),
            *(stride for x in (q, k, v, dout) for stride in strides(x, 4)),
            *(stride for x in (lse, *added) for stride in strides(x, 3)), slopes_stride,
        )  # fmt: skip
        constant = constants(config, dim, value_dim, q.dtype, described)
        blocks = tuple([config.block_columns, x.shape[3]] for x in walked)
        prepared.append(
            Prepared(
                kernel, (tile_count * batch_heads,), q.device, arguments,
                flags | constant | {"HAS_FULL": launch.has_full, "HAS_CUT": launch.has_cut}
                | {"num_warps": warps, "num_stages": stages},
                blocks if described == "host" else (),
            )
        )  # fmt: skip
    return _Backward(prepared, copies if any(copies) else ())


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Return out·dout − dlse (B, T, H) fp32.

    out and dout are (B, T, H, Dv). `dlse` (B, T, H) is the gradient of lse, or None if lse has
    none.
    """
    call: _Delta = kept_call("delta", (out, dout, dlse), _prepare_delta)
    result = torch.empty(call.shape, dtype=torch.float32, device=call.device)
    if call.launch is not None:
        out, dout = ready((out, dout), call.copies)
        run(call.launch, out, dout, result if dlse is None else dlse, result)
    return result


class _Delta(NamedTuple):
    """A prepared call, without its tensors. For an empty result, there is no launch."""

    shape: tuple[int, ...]
    device: torch.device
    copies: tuple[bool, ...]
    launch: Prepared | None


def _prepare_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> _Delta:
    shapes = Shapes()
    shapes.check("out", out, "B T H V")
    shapes.check("dout", dout, "B T H V")
    if dlse is not None:
        shapes.check("dlse", dlse, "B T H")
    copies = copied(_DELTA_CONFIG, (out, dout))
    out, dout = ready((out, dout), copies)
    batch, rows, heads, value_dim = out.shape
    result = torch.empty((batch, rows, heads), device="meta")
    if not result.numel():
        return _Delta(result.shape, out.device, copies, None)
    gradient = result if dlse is None else dlse
    arguments = (
        rows, heads, *strides(out, 4), *strides(dout, 4), *strides(gradient, 3),
        *strides(result, 3),
    )  # fmt: skip
    flags = {
        **dims_of("DV", value_dim), "TILE_ROWS": _DELTA_CONFIG.tile_rows,
        "HAS_DLSE": dlse is not None, "num_warps": _DELTA_CONFIG.warps,
        "num_stages": _DELTA_CONFIG.stages,
    }  # fmt: skip
    grid = (triton.cdiv(rows, _DELTA_CONFIG.tile_rows) * batch * heads,)
    launch = Prepared(flash_delta, grid, out.device, arguments, flags)
    return _Delta(result.shape, out.device, copies, launch)
