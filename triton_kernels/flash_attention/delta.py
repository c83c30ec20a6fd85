"""FlashAttention-2's delta, which backward needs once per row.

Dao, "FlashAttention-2" (2023), section 3.1, algorithm 2, line 4: D = rowsum(dO ∘ O). Here it is
delta = out·dout − dlse, which also takes the gradient of lse.

Strides are arguments named `operand_dimension`, in elements. Dimensions: b batch, t rows, h heads,
d head dim. Operands: o is out, g is dout, l is dlse, d is delta.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import Shapes
from ..specialisation import kernel
from .configs import Config, padded
from .launching import Prepared, copied, ready, run, signature, strides
from .tiles import load_rows, rows_of_program

CONFIG = Config(64, 0, 4, 1)


@kernel
def flash_delta(
    out, dout, dlse, delta, rows_total, heads,
    o_b, o_t, o_h, o_d, g_b, g_t, g_h, g_d, l_b, l_t, l_h, d_b, d_t, d_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TILE_ROWS: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Write delta of TILE_ROWS of the `rows_total` rows of one head; for shapes see `delta`."""
    batch, head, row, rows, valid = rows_of_program(rows_total, heads, TILE_ROWS)
    out += batch * o_b + head * o_h
    dout += batch * g_b + head * g_h
    out_rows = load_rows(out, row, rows_total, o_t, o_d, TILE_ROWS, DV, BLOCK_DV).to(tl.float32)
    dout_rows = load_rows(dout, row, rows_total, g_t, g_d, TILE_ROWS, DV, BLOCK_DV).to(tl.float32)
    value = tl.sum(out_rows * dout_rows, 1)
    if HAS_DLSE:
        at = dlse + batch * l_b + head * l_h + rows * l_t
        value -= tl.load(at, mask=valid, other=0.0).to(tl.float32)
    tl.store(delta + batch * d_b + head * d_h + rows * d_t, value, mask=valid)


def delta(
    out: Tensor, dout: Tensor, dlse: Tensor | None, prepared: dict[Hashable, Any] | None = None
) -> Tensor:
    """Return out·dout − dlse (B, T, H) fp32.

    out and dout are (B, T, H, Dv), and `dlse` (B, T, H) is the gradient of lse, if it has one. The
    prepared call, without its tensors, is kept in `prepared`.
    """
    prepared, key = {} if prepared is None else prepared, ("delta", signature(out, dout, dlse))
    call: _Delta | None = prepared.get(key)
    if call is None:
        call = prepared[key] = _prepare(out, dout, dlse)
    result = torch.empty(call.shape, dtype=torch.float32, device=call.device)
    if call.launch is not None:
        out, dout = ready((out, dout), call.copies)
        run(call.launch, out, dout, result if dlse is None else dlse, result)
    return result


class _Delta(NamedTuple):
    """A prepared call, without its tensors. An empty result has no launch."""

    shape: tuple[int, ...]
    device: torch.device
    copies: tuple[bool, ...]
    launch: Prepared | None


def _prepare(out: Tensor, dout: Tensor, dlse: Tensor | None) -> _Delta:
    """Check the arguments of `delta`; return the call without its tensors."""
    shapes = Shapes()
    shapes.check("out", out, "B T H V")
    shapes.check("dout", dout, "B T H V")
    if dlse is not None:
        shapes.check("dlse", dlse, "B T H")
    copies = copied(CONFIG, (out, dout))
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
        "DV": value_dim, "BLOCK_DV": padded(value_dim), "TILE_ROWS": CONFIG.tile_rows,
        "HAS_DLSE": dlse is not None, "num_warps": CONFIG.warps, "num_stages": CONFIG.stages,
    }  # fmt: skip
    grid = (triton.cdiv(rows, CONFIG.tile_rows) * batch * heads,)
    launch = Prepared(flash_delta, grid, out.device, arguments, flags)
    return _Delta(result.shape, out.device, copies, launch)
