"""A check of servers' results: this process computes a few rows again, and compares them.

A result is a sum of *terms*. For example, a row of out is the sum of the rows of v, each multiplied
by a probability.
"""

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
    """Return whether some rows of a server's result agree with what this process computes.

    For a forward pass, `rows` consecutive query rows of out and lse are compared. For a backward
    pass, `rows` consecutive query rows of dq and `rows` consecutive key rows of dk and dv are
    compared. `seed` chooses the rows.

    Each element of a result is a sum of terms. A kernel that computes only some rows of a task can
    add up the terms in a different order. The element that the server has computed and the element
    that this process has computed can therefore differ by

        16·((ε + (√n + s)·ε')·m + ε'·t)

    * m is the largest finite magnitude in the compared rows.
    * ε is the machine epsilon of the request's dtype. ε' is the machine epsilon of the dtype of
      sums, which is fp64 if the request is in fp64, and fp32 otherwise.
    * n is the number of query rows plus the number of key rows. The rounding errors of n terms add
      up like a random walk.
    * s is a bound of the scores. A score has an absolute error of up to s·ε'. Its exponential, a
      probability, then has a relative error of s·ε'.
    * t is a bound of the terms. It is needed because a sum can be much smaller than its terms.

    Elements of a forward pass that are not finite must be equal in both results. If an input of a
    backward pass is not finite, the result counts as right, because a kernel spreads infinities and
    NaNs to other rows of the same tile.
    """
    if request.output is not None and not _is_finite(request):
        return True
    random = np.random.default_rng(seed)
    queries = _block(random, request.q.shape[1], rows)
    part = _part(request, queries, slice(0, request.k.shape[1]))
    again, terms = compute([part], request.q.device)[0], _terms(part)
    if request.output is None:
        return _close(results, [queries, queries], again, part, terms, request)
    keys = _block(random, request.k.shape[1], rows)
    dq, dk, dv = results
    if not _close([dq], [queries], again[:1], part, terms[:1], request):
        return False
    part = _part(request, slice(0, request.q.shape[1]), keys)
    again = compute([part], request.q.device)[0]
    terms = [_random_walk(part) * term for term in _terms(part)]
    return _close([dk, dv], [keys, keys], again[1:], part, terms[1:], request)


def _is_finite(request: Request) -> bool:
    output = request.output
    assert output is not None
    inputs = request.q, request.k, request.v, output.dout, output.ensure_delta()
    return all(bool(x.isfinite().all()) for x in inputs)


def _largest_score(part: Request) -> float:
    return abs(part.options.scale) * _longest_row(part.q) * _longest_row(part.k)


def _terms(part: Request) -> list[float]:
    """Return, for each result of a request, a bound of the terms that the result adds up. The terms
    are taken before they are multiplied by probabilities.

    For lse, the bound is that of a score, at most |scale|·|q|·|k|. For dq and dk, the gradient of a
    probability is at most |dout|·|v| + |delta|.
    """
    v, output = _longest_row(part.v), part.output
    if output is None:
        return [v, 1 + _largest_score(part)]
    dout, delta = _longest_row(output.dout), _longest_row(output.ensure_delta()[..., None])
    of_scores = abs(part.options.scale) * (dout * v + delta)
    return [of_scores * _longest_row(part.k), of_scores * _longest_row(part.q), dout]


def _random_walk(part: Request) -> float:
    """Return an upper bound of √Σp² for all keys, or 1 if the bound is below 1.

    A row of dk or dv is a sum over queries, in which each query's term is multiplied by p, the
    probability that the query gives to this key. The rounding errors of the terms add up like a
    random walk, so the error of the sum grows with √Σp². Because p is at most 1, p² is at most p,
    and √Σp² is at most √Σp. This function returns the largest √Σp of all keys. It computes Σp by a
    backward pass in which all elements of dout are 1, because dv is then Σp.

    A row of out or dq is a sum over keys. The probabilities of one query add up to 1, so √Σp² is at
    most 1, and this function is not needed.
    """
    assert part.output is not None
    ones = replace(part.output, dout=torch.ones_like(part.output.dout), prepared=None)
    _, _, sums = compute([replace(part, output=ones)], part.q.device)[0]
    return math.sqrt(max(1.0, float(sums.max()))) if sums.numel() else 1.0


def _longest_row(x: Tensor) -> float:
    lengths = torch.linalg.vector_norm(x.detach().double(), dim=-1)
    lengths = lengths[lengths.isfinite()]
    return float(lengths.max()) if lengths.numel() else 0.0


def _block(random: np.random.Generator, count: int, rows: int) -> slice:
    start = int(random.integers(max(0, count - rows) + 1))
    return slice(start, min(start + rows, count))


def _part(request: Request, queries: slice, keys: slice) -> Request:
    """Return a request that computes only the attention of some query rows of a request over some
    of its key rows.
    """
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
    results: Sequence[Tensor],
    blocks: Sequence[slice],
    again: Sequence[Tensor],
    part: Request,
    terms: Sequence[float],
    request: Request,
) -> bool:
    exact = accumulator_dtype(request.q.dtype)
    sums = math.sqrt(request.q.shape[1] + request.k.shape[1]) + _largest_score(part)
    eps = [torch.finfo(dtype).eps for dtype in (request.q.dtype, exact)]
    for x, block, expected, term in zip(results, blocks, again, terms, strict=True):
        got = x[:, block].to(expected.device)
        finite = expected.isfinite()
        if not torch.equal(got.isfinite(), finite):
            return False
        if not torch.equal(got[~finite].nan_to_num(0.0), expected[~finite].nan_to_num(0.0)):
            return False
        wanted = expected[finite].double()
        if not wanted.numel():
            continue
        largest = float(wanted.abs().max())
        roundings = (eps[0] + sums * eps[1]) * largest + eps[1] * term
        if float((got[finite].double() - wanted).abs().max()) > _ROUNDINGS * roundings:
            return False
    return True
