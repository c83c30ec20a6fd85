"""Results of kernel calls that wait until one Triton kernel merges or adds several of them.

Legend: B batch, T rows, n rows of a result, H heads, D head dim.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.device_tables import is_on_cuda
from seqpar.softmax.wire.row_messages import Rows


class Result(NamedTuple):
    """What a kernel computed for some rows over some keys."""

    rows: slice | Rows
    out: Tensor  # (B, n, H, D)
    lse: Tensor | None  # (B, n, H), or None for results that are added without weights
    is_owned: bool  # whether nothing else uses the tensors


class WaitingResults:
    """Keeps results for rows of (B, T, H, D), in the dtypes of their kernels, until it sums them.

    `Partial` sums results by merging them, weighted by lse. `QuerySums` adds them. On CUDA several
    results wait. On other devices only a first result of all rows waits, for the next result.
    """

    # The most that results and sums may take together, in bytes per element of (B, T, H, D)
    most_bytes: int

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, by_kernel: bool
    ) -> None:
        """Prepare for sums of this shape and dtype, on the device of `like`.

        With `by_kernel`, the Triton kernel sums the results on CUDA, if the sums are in fp32.
        """
        self._shape, self._device, self.dtype = shape, like.device, dtype
        # Whether the Triton kernel sums the results
        self._by_kernel = by_kernel and is_on_cuda(like) and dtype == torch.float32
        self._elements = math.prod(shape)
        self._waiting: list[Result] = []
        self._held = 0  # bytes of the results that wait
        self._may_wait = True

    def make_room(self, rows: int, dtype: torch.dtype, columns: int = 0) -> None:
        """Sum the results that wait, unless a result of `rows` rows can wait beside them.

        Backends call it before a kernel allocates its result in this dtype. `columns` is the head
        dim of what the kernel allocates, if that is larger than D.
        """
        if not self._waiting:
            return
        batch, _, heads, width = self._shape
        needed = batch * rows * heads * max(columns, width) * dtype.itemsize
        if not (self._by_kernel and self._fits(needed)):
            self._sum_up()

    def request_tables(self, rows: slice | Rows) -> None:
        """Request the table that summing results of these rows reads."""
        if self._by_kernel:
            self._place(rows)
        elif isinstance(rows, Rows):
            rows.local(self._device)

    def _sum_up(self) -> object:
        """Sum the results that wait, and return the sums."""
        raise NotImplementedError

    @property
    def _has_sums(self) -> bool:
        raise NotImplementedError

    def _wait(self, result: Result) -> None:
        """Let a result wait for the kernel, if results may wait."""
        needed = _held_bytes(result)
        if self._waiting and not (
            self._fits(needed) and _dtypes(self._waiting[0]) == _dtypes(result)
        ):
            self._sum_up()  # one launch reads results of one dtype
        self._waiting.append(result)
        self._held += needed
        if not self._may_wait:
            self._sum_up()

    def _keep(self, result: Result) -> bool:
        """Let a result wait if it is the first one and has all rows; return whether it waits."""
        kept = not self._has_sums and not self._waiting and self._is_whole(result)
        if kept:
            self._waiting.append(result)
        return kept

    def _is_whole(self, result: Result) -> bool:
        """Return whether the result could be the sums: owned, of all rows, and contiguous."""
        rows, count = result.rows, self._shape[1]
        are_all = rows.are_all(count) if isinstance(rows, Rows) else rows == slice(0, count)
        return result.is_owned and are_all and result.out.is_contiguous()

    @property
    def _is_one_result(self) -> bool:
        waiting = self._waiting
        return not self._has_sums and len(waiting) == 1 and self._is_whole(waiting[0])

    def _fits(self, needed: int) -> bool:
        """Return whether a result that takes these bytes can wait with the others."""
        limit = self.most_bytes - (self.dtype.itemsize if self._has_sums else 0)
        fits = self._held + needed <= limit * self._elements
        return fits and len(self._waiting) < _most_hops()

    def _merge_by_kernel(
        self,
        out: Tensor,
        lse: Tensor | None,
        sums: tuple[Tensor, Tensor | None] | None,
        sinks: Tensor | None = None,
    ) -> None:
        """Write the sums, if there are any, merged with the results that wait, to out and lse."""
        from seqpar.kernels.flash_attention import HopResult, merge_hops  # imports Triton

        hops = [HopResult(x.out, x.lse, self._place(x.rows)) for x in self._waiting]
        merge_hops(hops, out, lse, *(sums or (None, None)), sinks)

    def _place(self, rows: slice | Rows) -> int | Tensor:
        if isinstance(rows, Rows):
            return rows.place(self._shape[1], self._device)
        return rows.start or 0


@cache
def _most_hops() -> int:
    from seqpar.kernels.flash_attention import MOST_HOPS  # imports Triton

    return MOST_HOPS


def _held_bytes(result: Result) -> int:
    """Return the memory that a result keeps: also that of columns that its kernel has added."""
    out = result.out
    return out.untyped_storage().nbytes() if result.is_owned else out.nbytes


def _dtypes(result: Result) -> tuple[torch.dtype, torch.dtype | None]:
    return result.out.dtype, None if result.lse is None else result.lse.dtype
