"""Summaries of rows of a tensor: a norm, a mean and a few random projections, in fp64.

A projection is the dot product of a row and a vector of random signs. A sign depends only on the
position in the row, so equal rows have equal projections in every run and on every rank. If two
rows differ by a vector d, their projections differ by the dot product of d and the signs, whose
square is |d|² on average. `compare.py` therefore estimates |d| from the differences of projections,
and does not need the rows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PROJECTIONS = 4
# Columns of a summary: norm (or sum of squares), mean (or sum), projections.
COLUMNS = 2 + PROJECTIONS
SIZE_BINS = 256  # bin i counts magnitudes from 2^(i − 127) up to 2^(i − 126), as exponents of fp32
_MAX_ELEMENTS = 2**24  # most elements that are converted to fp64 at a time: 128 MiB


@functools.lru_cache(maxsize=256)
def signs(start: int, count: int, salt: int, device: torch.device) -> Tensor:
    """Return random signs (count, PROJECTIONS) in fp64 for positions start … start + count − 1.

    A sign is one bit of a hash of the position and `salt`. A position therefore has the same sign
    in every part of a row that contains it.
    """
    index = np.arange(start, start + count, dtype=np.uint64)[:, None] * np.uint64(PROJECTIONS)
    mixed: Any = index + np.arange(PROJECTIONS, dtype=np.uint64) + np.uint64(1 + (salt << 48))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    bits = (mixed >> np.uint64(40)) & np.uint64(1)
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64)).to(device)


@functools.lru_cache(maxsize=256)
def with_ones(start: int, count: int, salt: int, device: torch.device) -> Tensor:
    """Return (count, 1 + PROJECTIONS): a column of ones and the columns of `signs`.

    The product of a row and the column of ones is the sum of the row.
    """
    found = signs(start, count, salt, device)
    return torch.cat([torch.ones_like(found[:, :1]), found], 1)


def summarise(rows_TC: Tensor) -> Tensor:
    """Return (T, COLUMNS) in fp64: each row's norm, mean and projections."""
    if rows_TC.is_complex():
        rows_TC = torch.view_as_real(rows_TC).flatten(1)
    tokens, features = rows_TC.shape
    if tokens > (step := max(1, _MAX_ELEMENTS // max(1, features))):
        return torch.cat([summarise(x) for x in rows_TC.split(step)])
    exact = rows_TC.double()
    sums = exact @ with_ones(0, features, 0, exact.device)
    sums[:, 0] /= max(1, features)
    return torch.cat([torch.linalg.vector_norm(exact, dim=1)[:, None], sums], 1)


def count_sizes(block: Tensor) -> Tensor:
    """Return (SIZE_BINS,) in fp64: how many elements of a block have a magnitude in each bin.

    An element that is 0, subnormal, infinite or NaN in fp32 is in no bin.
    """
    magnitudes = torch.view_as_real(block) if block.is_complex() else block
    total = torch.zeros(SIZE_BINS, dtype=torch.float64, device=block.device)
    for part in magnitudes.reshape(-1).split(_MAX_ELEMENTS):
        exponents = (part.float().view(torch.int32) >> 23) & 255
        total += torch.bincount(exponents, minlength=SIZE_BINS)
    total[0] = total[-1] = 0
    return total


def size_edges() -> NDArray[np.float64]:
    """Return (SIZE_BINS,): the smallest magnitude of each bin."""
    exponents = np.arange(SIZE_BINS, dtype=np.float64) - 127
    return np.power(2.0, exponents)


def summarise_block(block: Tensor, offsets: tuple[int, ...] = ()) -> Tensor:
    """Return (COLUMNS,) in fp64: a block's sum of squares, sum and projections.

    `offsets` are the indices of the block's first element in the whole tensor. The summary of the
    whole tensor is the sum of its blocks' summaries. A projection multiplies each element by the
    sign of its row and by the sign of its column, and adds up the products.
    """
    if block.is_complex():
        block = torch.view_as_real(block)
    row, *others = (*offsets, 0, 0)[: max(1, block.dim())]
    matrix = block.reshape(block.shape[0], -1) if block.dim() else block.reshape(1, 1)
    below = matrix.shape[1] // max(1, block.shape[1]) if block.dim() > 1 else 1
    column = (others[0] if others else 0) * below
    total = torch.zeros(COLUMNS, dtype=torch.float64, device=block.device)
    step = max(1, _MAX_ELEMENTS // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], step):
        exact = matrix[start : start + step].double()
        products = exact @ with_ones(column, matrix.shape[1], 1, exact.device)
        products[:, 1:] *= signs(row + start, len(exact), 2, exact.device)
        flat = exact.reshape(-1)
        total += torch.cat([torch.dot(flat, flat)[None], products.sum(0)])
    return total
