"""The arithmetic of a short convolution on a rank, and its gradients.

The *window* of a row is the row and a few tokens before it. A *tap* is the weight of one token of a
window, for each channel. The first rows of a document, or of a span whose earlier tokens are on
another rank, have windows that are not consecutive rows of this rank. These first rows are called
*edges* (`rows.py`). A rank first convolves all of its rows as if they were one document
(`_consecutive`), which gives wrong results at the edges. When the rows of other ranks have arrived,
the rank computes the edges again (`_gathered`), and replaces the wrong results.

In backward, a rank receives the gradients of the sums at the tokens after its spans, and computes
all gradients of its own rows. Rows are computed in blocks that fit into a CPU's cache. The
computation in blocks is five times as fast as ATen's depthwise convolution.

T is the number of rows, B the batch and C the number of channels. In this file, rows are (T, B, C),
and windows are (n, reach + 1, B, C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from seqpar.comm.messages.comm import Comm
from seqpar.core.dtypes import accumulator_dtype
from seqpar.halo.rows import HaloRows

_BLOCK = 2**17  # the number of elements of the blocks in which a CPU computes
Finish = Callable[[Tensor, Tensor], Tensor]


class Taps(NamedTuple):
    places: list[int]  # the indices in the window of the tokens that have a tap
    # for each such token, a tap (C,) in the dtype of sums; None means 1
    weights: list[Tensor | None]
    reach: int  # the number of tokens in a window, in addition to the row itself
    following: bool  # whether these tokens come after the row, instead of before it
    # (C,) in the dtype of sums, with which each sum begins; None means 0
    bias: Tensor | None = None

    @classmethod
    def of(
        cls, weight: Tensor | None, reach: int, following: bool, bias: Tensor | None = None
    ) -> Taps:
        """Return the taps of a weight (C, reach + 1). If `weight` is None, return a shift by
        `reach` tokens.
        """
        if weight is None:
            return cls([reach if following else 0], [None], reach, following)
        columns = weight.t().to(accumulator_dtype(weight.dtype)).contiguous().unbind()
        bias = None if bias is None else bias.to(accumulator_dtype(bias.dtype))
        places = list(range(reach + 1))
        return cls(places, list(columns[::-1] if following else columns), reach, following, bias)

    def weigh(self, tokens: list[Tensor]) -> Tensor:
        total = self.bias
        for place, tap in zip(self.places, self.weights, strict=True):
            if tap is None:
                return tokens[place]
            if total is None:
                total = tokens[place] * tap
            elif total is self.bias:
                total = torch.addcmul(total, tokens[place], tap)
            else:
                total.addcmul_(tokens[place], tap)
        assert total is not None
        return total


def _blocks(x: Tensor) -> Iterator[tuple[int, int]]:
    rows, size = x.shape[0], max(x.shape[1] * x.shape[2], 1)
    step = max(8, _BLOCK // size) if x.device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _consecutive(x: Tensor, start: int, stop: int, reach: int, following: bool) -> list[Tensor]:
    """Return the windows of the rows from `start` to `stop`. The window of a row is the row and the
    `reach` tokens before it, or after it if `following` is True.

    The i-th of the `reach` + 1 tensors has the i-th token of each window. Tokens before the first
    local row and after the last local row are zeros.
    """
    first, last = (start, stop + reach) if following else (start - reach, stop)
    inside = x[max(first, 0) : last].to(accumulator_dtype(x.dtype))
    missing = max(-first, 0), max(last - x.shape[0], 0)
    if any(missing):
        inside = F.pad(inside, (0, 0, 0, 0, *missing))
    return [inside[i : i + stop - start] for i in range(reach + 1)]


def _gathered(x: Tensor, received: Tensor, halo: HaloRows, reach: int) -> list[Tensor]:
    """Return the windows of those rows whose windows are not consecutive local rows. The window of
    a row is the row and the `reach` tokens before it, or after it in backward.

    The i-th of the `reach` + 1 tensors has the i-th token of each window, in the dtype in which
    sums are computed.
    """
    windows = x.new_zeros((halo.edges.numel() * (reach + 1), *x.shape[1:]))
    windows.index_copy_(0, halo.held_places, x.index_select(0, halo.held_rows))
    windows.index_copy_(0, halo.halo_places, received.index_select(0, halo.halo_rows))
    by_token = windows.unflatten(0, (-1, reach + 1)).to(accumulator_dtype(x.dtype))
    return list(by_token.unbind(1))


def exchange(comm: Comm, x: Tensor, halo: HaloRows, room: int, label: str) -> Callable[[], Tensor]:
    """Post an exchange of the rows that ranks need from each other.

    The returned function waits until the rows of other ranks have arrived, and returns a tensor
    (room, B, C), whose first rows are the received rows. `room` is at least the number of rows that
    this rank receives.
    """
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
    """Write the weighted sum over the window of each row to `out`. Return the rows that were
    received from other ranks.

    The window of a row is the row and a few tokens before it. If `finish` is given, `finish(sums,
    rows)` is written instead of the sums. In this call, `rows` are rows of `beside`, or rows of x
    if `beside` is None.
    """
    finish, beside = finish or _as_it_is, x if beside is None else beside
    if halo.edges.numel() < x.shape[0]:
        for start, stop in _blocks(x):
            windows = _consecutive(x, start, stop, taps.reach, taps.following)
            out[start:stop] = finish(taps.weigh(windows), beside[start:stop])
    arrived = received()
    if halo.edges.numel():
        sums = taps.weigh(_gathered(x, arrived, halo, taps.reach))
        of_edges = finish(sums, beside.index_select(0, halo.edges))
        out.index_copy_(0, halo.edges, of_edges.to(out.dtype))
    return arrived


def tap_gradients(
    d: Tensor, x: Tensor, halo: HaloRows, received: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the taps, (C, reach + 1), and the gradient of the bias, (C,).

    `d` is the gradient of the sums.
    """
    dtype = accumulator_dtype(x.dtype)
    dtaps, dbias = (x.new_zeros((*n, x.shape[2]), dtype=dtype) for n in ((reach + 1,), ()))

    def add(tokens: list[Tensor], rows: Tensor) -> None:
        rows = rows.to(dtype)
        dbias.add_(rows.sum((0, 1)))
        for place, token in enumerate(tokens):
            dtaps[place] += (rows * token).sum((0, 1))

    if halo.edges.numel() < x.shape[0]:
        inner = d.index_fill(0, halo.edges, 0)
        for start, stop in _blocks(x):
            add(_consecutive(x, start, stop, reach, following=False), inner[start:stop])
    if halo.edges.numel():
        add(_gathered(x, received, halo, reach), d.index_select(0, halo.edges))
    return dtaps.t(), dbias


def silu(sums: Tensor, _: Tensor) -> Tensor:
    return F.silu(sums, inplace=True)


def silu_gradient(sums: Tensor, dout: Tensor) -> Tensor:
    gate = torch.sigmoid(sums)
    return (1 + sums * (1 - gate)).mul_(gate).mul_(dout)


def _as_it_is(sums: Tensor, _: Tensor) -> Tensor:
    return sums
