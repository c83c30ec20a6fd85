"""A convolution on a rank, with the gradients of its rows and its taps.

Rows are (T, B, C), as in `taps.py`. A rank first convolves all of its rows as if they were one
document. When the rows of other ranks have arrived, it computes the first rows of each span again.
Backward fetches the gradients of the sums after a span instead of returning parts of rows'
gradients, which are therefore added in the same order under every layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from seqpar.comm.messages.exchange import Comm
from seqpar.core.dtypes import accumulator_dtype
from seqpar.halo.rows import HaloRows
from seqpar.halo.taps import Taps, blocks, consecutive, gathered

Finish = Callable[[Tensor, Tensor], Tensor]


def exchange(comm: Comm, x: Tensor, halo: HaloRows, room: int, label: str) -> Callable[[], Tensor]:
    """Post rows to the ranks that need them; return a function that waits for (room, B, C)."""
    parts = x.index_select(0, halo.sent).split([count for _, count in halo.sends])
    received = x.new_empty((room, *x.shape[1:]))
    arriving = received[: halo.received].split([count for _, count in halo.receives])
    sends = [(peer, part) for (peer, _), part in zip(halo.sends, parts, strict=True)]
    recvs = [(peer, part) for (peer, _), part in zip(halo.receives, arriving, strict=True)]
    pending = comm.exchange(sends, recvs, label=label)

    def wait() -> Tensor:
        pending.wait()
        return received

    return wait


def convolve(
    out: Tensor,
    x: Tensor,
    taps: Taps,
    halo: HaloRows,
    received: Callable[[], Tensor],
    finish: Finish | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """Write the sums over the rows' windows into `out`; return the received rows.

    `finish(sums, rows)`, if given, makes the values to write from sums and rows of `beside` (or x).
    """
    finish, beside = finish or _as_it_is, x if beside is None else beside
    if halo.edges.numel() < x.shape[0]:
        for start, stop in blocks(x):
            windows = consecutive(x, start, stop, taps.reach, taps.following)
            out[start:stop] = finish(taps.weigh(windows), beside[start:stop])
    arrived = received()
    if halo.edges.numel():
        sums = taps.weigh(gathered(x, arrived, halo, taps.reach))
        of_edges = finish(sums, beside.index_select(0, halo.edges))
        out.index_copy_(0, halo.edges, of_edges.to(out.dtype))
    return arrived


def tap_gradients(
    d: Tensor, x: Tensor, halo: HaloRows, received: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """Return the taps' (C, reach + 1) and the bias's (C,) gradients; `d` is that of the sums."""
    dtype = accumulator_dtype(x.dtype)
    dtaps, dbias = (x.new_zeros((*n, x.shape[2]), dtype=dtype) for n in ((reach + 1,), ()))

    def add(tokens: list[Tensor], rows: Tensor) -> None:
        rows = rows.to(dtype)
        dbias.add_(rows.sum((0, 1)))
        for place, token in enumerate(tokens):
            dtaps[place] += (rows * token).sum((0, 1))

    if halo.edges.numel() < x.shape[0]:
        inner = d.index_fill(0, halo.edges, 0)
        for start, stop in blocks(x):
            add(consecutive(x, start, stop, reach, following=False), inner[start:stop])
    if halo.edges.numel():
        add(gathered(x, received, halo, reach), d.index_select(0, halo.edges))
    return dtaps.t(), dbias


def silu(sums: Tensor, _: Tensor) -> Tensor:
    return F.silu(sums, inplace=True)


def silu_gradient(sums: Tensor, dout: Tensor) -> Tensor:
    gate = torch.sigmoid(sums)
    return (1 + sums * (1 - gate)).mul_(gate).mul_(dout)


def _as_it_is(sums: Tensor, _: Tensor) -> Tensor:
    return sums
