"""Compute a few rows of a task again, to check a server's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.memo import Memo
from seqpar.layout.masks.mask import Slices
from seqpar.servers.server.compute import compute
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.partial import OutputGradient

_ROUNDINGS = 16


def is_right(request: Request, results: Sequence[Tensor], rows: int, seed: int) -> bool:
    """Return whether some rows of a result agree with this process's computation.

    Compares `rows` consecutive query rows of out and lse, or of dq; in a backward also `rows`
    consecutive key rows of dk and dv. `seed` chooses the rows.

    A kernel that computes part of a task sums in another order, so numbers may differ by
    16·(ε + √n·ε')·m, where m is the largest finite magnitude in the compared tensor, ε the epsilon
    of the request's dtype, ε' the epsilon of fp32 (fp64 for fp64), and n the number of query and
    key rows: the rounding errors of n terms add up like a random walk. Values that are not finite
    must be the same.
    """
    random = np.random.default_rng(seed)
    queries = _block(random, request.q.shape[1], rows)
    part = _part(request, queries, slice(0, request.k.shape[1]))
    again = compute([part], request.q.device)[0]
    if request.output is None:
        return _close(results, [queries, queries], again, request)
    keys = _block(random, request.k.shape[1], rows)
    dq, dk, dv = results
    if not _close([dq], [queries], again[:1], request):
        return False
    part = _part(request, slice(0, request.q.shape[1]), keys)
    return _close([dk, dv], [keys, keys], compute([part], request.q.device)[0][1:], request)


def _block(random: np.random.Generator, count: int, rows: int) -> slice:
    start = int(random.integers(max(0, count - rows) + 1))
    return slice(start, min(start + rows, count))


def _part(request: Request, queries: slice, keys: slice) -> Request:
    """Return the part of a task that has these query rows and these key rows."""
    output = request.output
    if output is not None:
        rows = output.dout, output.lse, output.ensure_delta()
        dout, lse, delta = (x[:, queries] for x in rows)
        dlse = None if output.dlse is None else output.dlse[:, queries]
        output = OutputGradient(dout, None, lse, dlse, delta)
    q, k, v = request.q[:, queries], request.k[:, keys], request.v[:, keys]
    slices = _slices(request.slices, queries, keys)
    return Request(q, k, v, slices, request.options, request.exact_out, output)


def _slices(slices: Slices, queries: slice, keys: slice) -> Slices:
    q_rows = np.clip(slices.q_rows, queries.start, queries.stop) - queries.start
    k_rows = np.clip(slices.k_rows, keys.start, keys.stop) - keys.start
    kept = (q_rows[:, 0] < q_rows[:, 1]) & (k_rows[:, 0] < k_rows[:, 1])
    return replace(
        slices,
        q_rows=q_rows[kept],
        k_rows=k_rows[kept],
        bands=slices.bands[kept],
        q_positions=slices.q_positions[queries],
        k_positions=slices.k_positions[keys],
        derived=Memo(),
        q_aligned=slices.aligned[queries],
    )


def _close(
    results: Sequence[Tensor], blocks: Sequence[slice], again: Sequence[Tensor], request: Request
) -> bool:
    terms, exact = request.q.shape[1] + request.k.shape[1], accumulator_dtype(request.q.dtype)
    for x, block, expected in zip(results, blocks, again, strict=True):
        got = x[:, block].to(expected.device)
        finite = expected.isfinite()
        if not torch.equal(got.isfinite(), finite):
            return False
        if not torch.equal(got[~finite].nan_to_num(0.0), expected[~finite].nan_to_num(0.0)):
            return False
        wanted = expected[finite].double()
        eps = [torch.finfo(dtype).eps for dtype in (request.q.dtype, exact)]
        roundings = _ROUNDINGS * (eps[0] + math.sqrt(terms) * eps[1])
        allowed = roundings * float(wanted.abs().max()) if wanted.numel() else 0.0
        if wanted.numel() and float((got[finite].double() - wanted).abs().max()) > allowed:
            return False
    return True
