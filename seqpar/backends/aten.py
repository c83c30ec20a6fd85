"""Attention over slices with ATen's fused kernels.

ATen computes a full rectangle of scores, a causal square, or a rectangle under an additive mask. `lower` cuts slices into
such pieces in *row* coordinates, where a causal mask over a rank's own tokens is one causal square whatever the layout.
On CPU the kernel is `_scaled_dot_product_flash_attention_for_cpu`. It takes half precision too, but is faster in fp32, rounding
just at the end, unless the CPU has matrix units. On CUDA it is FlashAttention-2 for half-precision pieces without a mask, and
plain PyTorch for the others. A softcap is computed in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.backends import reference
from seqpar.mask import Slices

if TYPE_CHECKING:
    from seqpar.attend import Gradients, Partial, Scoring, Upstream

_ops = torch.ops.aten
_MAX_TILE = 768  # query rows of a masked tile: from 768 on ATen's CPU kernel takes its largest blocks
_MIN_TILE = 64
_HALF = (torch.bfloat16, torch.float16)
_SHORT = 1024  # up to so many query rows the backward of one device rounds its results but once, and ours must not twice
_STEP = 256  # steps of at least so many rows are computed each on its own


class Piece(NamedTuple):
    """Query rows × key rows: full, a causal square, or masked by a band of k_pos − q_pos."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    band: tuple[int, int] | None = None
    first: bool = False  # no piece before it has any of its query rows

    @property
    def rows(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)


Kernel = Callable[..., tuple[Tensor, ...]]
Share = tuple[list[Piece], Slices]  # what a kernel computes, and what is left to plain PyTorch


def forward(q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, scoring: Scoring) -> None:
    """Merge into `partial` the attention of q (B, T, Hq, D) over k and v."""
    forward_by(_forward, _share(q, slices, scoring), q, k, v, slices, partial, scoring)


def forward_by(
    kernel: Kernel, share: Share, q: Tensor, k: Tensor, v: Tensor, slices: Slices, partial: Partial, scoring: Scoring
) -> None:
    """The same with any kernel that computes pieces (out and lse, lse −inf where a row sees nothing)."""
    fused, plain = share
    reference.forward(q, k, v, plain, partial, scoring)
    width = _width(q, v)
    q, k, v = (_pad(x, width) for x in (q, k, v))
    for piece in fused:
        out, lse = kernel(q[:, piece.rows], k[:, piece.keys], v[:, piece.keys], piece, slices, scoring)
        first = piece.first and partial.empty and not len(plain)
        (partial.put if first else partial.merge)(piece.rows, out[..., : partial.out.shape[-1]], lse)


def backward(up: Upstream, q: Tensor, k: Tensor, v: Tensor, slices: Slices, gradients: Gradients, scoring: Scoring) -> None:
    """Add to `gradients` what flows through the slices."""
    backward_by(_backward, _share(q, slices, scoring), up, q, k, v, slices, gradients, scoring)


def backward_by(
    kernel: Kernel,
    share: Share,
    up: Upstream,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    gradients: Gradients,
    scoring: Scoring,
) -> None:
    """The same with any kernel that computes pieces (dq, dk and dv).

    Fused kernels have no gradient of lse. A column of ones beside v, with dlse beside dout and zeros beside out, adds it to
    dout·v.
    """
    fused, plain = share
    reference.backward(up, q, k, v, plain, gradients, scoring)
    dim, value_dim, dout = q.shape[-1], v.shape[-1], up.dout
    if up.dlse is not None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        dout = torch.cat([dout, up.dlse[..., None].to(dout.dtype)], -1)
    width = _width(q, v)
    q, k, v, dout, out = (_pad(x, width) for x in (q, k, v, dout, up.with_out()))
    for piece in fused:
        rows, keys = piece.rows, piece.keys
        dq, dk, dv = kernel(
            dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], up.lse[:, rows], piece, slices, scoring
        )
        gradients.dq[:, rows] += dq[..., :dim]
        gradients.dk[:, keys] += dk[..., :dim]
        gradients.dv[:, keys] += dv[..., :value_dim]


def lower(slices: Slices) -> list[Piece]:
    """The pieces that together are the slices; kept with them. Full pieces of the same rows over adjacent keys are joined."""
    if "aten" not in slices.lowered:
        pieces = [piece for i in range(len(slices)) for piece in _lower_slice(slices, i)]
        joined: list[Piece] = []
        for piece in sorted((p for p in pieces if not p.causal and p.band is None), key=lambda p: p[:3]):
            if joined and joined[-1][:2] == piece[:2] and joined[-1].k_stop == piece.k_start:
                joined[-1] = joined[-1]._replace(k_stop=piece.k_stop)
            else:
                joined.append(piece)
        joined += [p for p in pieces if p.causal or p.band is not None]
        seen = np.zeros(slices.q_positions.size, dtype=bool)
        for i, piece in enumerate(joined):
            joined[i] = piece._replace(first=not seen[piece.rows].any())
            seen[piece.rows] = True
        slices.lowered["aten"] = joined
    return slices.lowered["aten"]


def _lower_slice(slices: Slices, i: int) -> list[Piece]:
    """Pieces of one slice, from the interval [start, stop) of its key rows that each of its query rows sees."""
    (q0, q1), (k0, k1), band = slices.q_rows[i].tolist(), slices.k_rows[i].tolist(), tuple(slices.bands[i].tolist())
    start, stop = slices.visible(i)
    rows, keys = q1 - q0, k1 - k0
    base = int(stop[0]) - 1
    if not start.any() and (stop == np.minimum(base + 1 + np.arange(rows), keys)).all():
        side = min(rows, keys - base)
        pieces = [
            Piece(q0, q0 + side, k0, k0 + base),
            Piece(q0, q0 + side, k0 + base, k0 + base + side, causal=True),
            Piece(q0 + side, q1, k0, k1),
        ]
        if side == 1:  # a causal square of one pair is full
            pieces = [Piece(q0, q1, k0, k1)]
        return [piece for piece in pieces if piece.q_stop > piece.q_start and piece.k_stop > piece.k_start]
    edges = np.flatnonzero((np.diff(start) != 0) | (np.diff(stop) != 0)) + 1
    if rows >= (edges.size + 1) * _STEP:  # a staircase of long steps: each is full
        first, last = np.r_[0, edges], np.r_[edges, rows]
        steps = zip(first, last, start[first], stop[first], strict=True)
        return [Piece(int(q0 + a), int(q0 + b), int(k0 + c), int(k0 + d)) for a, b, c, d in steps if d > c]
    tile = int(np.clip((stop - start).mean(), _MIN_TILE, _MAX_TILE))
    pieces = []
    for a in range(0, rows, tile):
        b = min(a + tile, rows)
        outer, inner = (int(start[a]), int(stop[b - 1])), (int(start[b - 1]), int(stop[a]))
        cut = [outer]
        if inner[1] - inner[0] > 2 * tile:  # worth a piece of its own, without a mask
            pieces.append(Piece(q0 + a, q0 + b, k0 + inner[0], k0 + inner[1]))
            cut = [(outer[0], inner[0]), (inner[1], outer[1])]
        pieces += [Piece(q0 + a, q0 + b, k0 + c, k0 + d, band=band) for c, d in cut if d > c]
    return pieces


def _share(q: Tensor, slices: Slices, scoring: Scoring) -> Share:
    """What ATen's kernel computes, and what is left to plain PyTorch."""
    if scoring.softcap or (q.is_cuda and q.dtype not in _HALF):
        return [], slices
    return share_unmasked(slices) if q.is_cuda else (lower(slices), _slices_of([], slices))


def share_unmasked(slices: Slices) -> Share:
    """For a kernel without masks: the full and causal pieces, and the others as slices."""
    pieces = lower(slices)
    masked = [piece for piece in pieces if piece.band is not None]
    return [piece for piece in pieces if piece.band is None], _slices_of(masked, slices)


def _slices_of(masked: list[Piece], slices: Slices) -> Slices:
    table = np.array([(*piece[:4], *(piece.band or ())) for piece in masked], dtype=np.int64).reshape(-1, 3, 2)
    return replace(slices, q_rows=table[:, 0], k_rows=table[:, 1], bands=table[:, 2])


def _forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece, slices: Slices, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """out (B, n, Hq, D) and lse (B, n, Hq) of a piece; a row that sees none of its keys has lse −inf."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.is_cuda:
        out, lse = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, piece.causal, scale=scoring.scale)[:2]
        return out.transpose(1, 2), lse.transpose(1, 2)
    if q.dtype in _HALF and not _has_bf16_units(q.dtype):
        q, k, v = (x.float() for x in (q, k, v))
    bias, blind = _bias(piece, slices, q.dtype)
    out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, piece.causal, attn_mask=bias, scale=scoring.scale)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return out, lse if blind is None else lse.masked_fill(blind[:, None], -torch.inf)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, slices: Slices, scoring: Scoring
) -> tuple[Tensor, ...]:
    """dq, dk, dv (B, n or m, H, D) of a piece, given the whole row's out and lse."""
    dout, q, k, v, out, lse = (x.transpose(1, 2) for x in (dout, q, k, v, out, lse))
    if q.is_cuda:
        empty = torch.empty(0, dtype=torch.int64, device=q.device)  # the dropout's random state: there is none
        none, lengths = (None, None), (q.shape[2], k.shape[2])
        op = _ops._scaled_dot_product_flash_attention_backward
        arguments = dout, q, k, v, out, lse.contiguous(), *none, *lengths, 0.0, piece.causal, empty, empty
        with _determinism(scoring.deterministic):
            gradients = op(*arguments, scale=scoring.scale)
    else:
        if q.dtype in _HALF and (q.shape[2] <= _SHORT or not _has_bf16_units(q.dtype)):
            dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        bias, _ = _bias(piece, slices, q.dtype)
        op = _ops._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = op(dout, q, k, v, out, lse, 0.0, piece.causal, attn_mask=bias, scale=scoring.scale)
    return tuple(x.transpose(1, 2) for x in gradients)


def _has_bf16_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of this dtype faster than fp32 ones."""
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """Within the context ATen's FlashAttention-2 backward gives the same bits each time, if that is wanted."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _bias(piece: Piece, slices: Slices, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask (n, m) of a piece, and which rows (n,) see none of its keys; None, None without a mask."""
    if piece.band is None:
        return None, None
    seen = slices.seen(piece.rows, piece.keys, piece.band)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf), ~seen.any(1)


def _width(q: Tensor, v: Tensor) -> int:
    """The head dim that ATen is given: it takes one for q, k and v, and on CUDA a multiple of 8."""
    width = max(q.shape[-1], v.shape[-1])
    return width if q.shape[-1] == v.shape[-1] and not q.is_cuda else -(-width // 8) * 8


def _pad(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
