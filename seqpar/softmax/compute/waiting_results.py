"""Store results of kernel calls until one Triton kernel merges or adds several of these results.

If the Triton kernel sums several results at once, the sum is written to memory only once.

Letters of shapes: B is the batch, T the number of rows, n the number of rows of a result, H the
number of heads, and D the head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.device_tables import is_on_cuda
from seqpar.softmax.wire.row_messages import Rows


class Result(NamedTuple):
    rows: slice | Rows
    out: Tensor  # (B, n, H, D)
    lse: Tensor | None  # (B, n, H), or None for gradients, which are added without weights
    is_owned: bool  # whether no other object uses the two tensors
    heads: slice | None = None  # the heads of the result, or None for all heads

    def of(self, heads: slice | None) -> Result:
        if heads == self.heads:
            return self
        lse = None if self.lse is None else self.lse[:, :, heads]
        return self._replace(out=self.out[:, :, heads], lse=lse, heads=heads)


class WaitingResults:
    """Stores results of kernels for rows of a tensor (B, T, H, D), to sum the results later.

    On CUDA, a Triton kernel usually sums several results at once. If no Triton kernel is used,
    torch adds each result to the sums immediately. A subclass says how results are summed.
    """

    # How much memory the stored results and the sums may take together, in bytes per element of (B,
    # T, H, D).
    most_bytes: int

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, by_kernel: bool
    ) -> None:
        """Prepare to store results whose sums have this shape and dtype, on the device of `like`.

        A Triton kernel sums the results if `by_kernel` is True, the device is a GPU, and the dtype
        is fp32. In all other cases, torch sums them.
        """
        self._shape, self._device, self.dtype = shape, like.device, dtype
        # Whether a Triton kernel sums the results.
        self._by_kernel = by_kernel and is_on_cuda(like) and dtype == torch.float32
        self._elements = math.prod(shape)
        # the largest number of bytes of stored results
        self._most_held = self.most_bytes * self._elements
        self._waiting: list[Result] = []
        self._held = 0  # the number of bytes of the stored results
        self._may_wait = True
        # Groups of heads that are summed separately. A result has all heads, or the heads of one
        # group.
        self._groups: Sequence[slice | None] = [None]

    @property
    def elements(self) -> int:
        return self._elements

    def divide(self, groups: Sequence[slice | None]) -> None:
        """Allow results that have only some of the heads: the heads of one of `groups`."""
        self._groups = groups

    @property
    def waits(self) -> bool:
        """Whether results are stored until the Triton kernel sums them."""
        return self._by_kernel and self._may_wait

    def make_room(self, rows: int, dtype: torch.dtype, columns: int = 0) -> None:
        """Sum the stored results if one more result would exceed the memory limit.

        Backends call this method before a kernel allocates the new result.

        Args:
            rows: the number of rows of the new result.
            dtype: the dtype of the new result.
            columns: the head dim that the kernel allocates, if this number is larger than D.
        """
        if not self._waiting:
            return
        if self._by_kernel:
            batch, _, count, width = self._shape
            if self._fits(batch * rows * count * max(columns, width) * dtype.itemsize, None):
                return
        self._sum_up()

    def request_tables(self, rows: slice | Rows) -> None:
        if self._by_kernel:
            self._place(rows)
        elif isinstance(rows, Rows):
            rows.local(self._device)

    def add_up(self) -> None:
        """Sum the stored results. After the call, the tensors of these results may change."""
        if self._waiting:
            self._sum_up()

    def _sum_up(self) -> object:
        raise NotImplementedError

    @property
    def _has_sums(self) -> bool:
        raise NotImplementedError

    def _drop_waiting(self) -> None:
        self._waiting, self._held = [], 0
        self._most_held = (self.most_bytes - self.dtype.itemsize) * self._elements

    def _wait(self, result: Result) -> None:
        needed = _held_bytes(result)
        if self._waiting and not (
            self._fits(needed, result.heads) and _have_equal_dtypes(self._waiting[0], result)
        ):
            self._sum_up()  # One launch reads results of a single dtype.
        self._waiting.append(result)
        self._held += needed
        if not self._may_wait:
            self._sum_up()

    def _keep(self, result: Result) -> bool:
        kept = not self._has_sums and not self._waiting and self._is_whole(result)
        if kept:
            self._waiting.append(result)
        return kept

    def _is_whole(self, result: Result) -> bool:
        """Return whether the result's own tensor can serve as the sums."""
        rows, count = result.rows, self._shape[1]
        are_all = rows.are_all(count) if isinstance(rows, Rows) else rows == slice(0, count)
        is_all = are_all and result.heads is None
        return result.is_owned and is_all and result.out.is_contiguous()

    @property
    def _is_one_result(self) -> bool:
        waiting = self._waiting
        return not self._has_sums and len(waiting) == 1 and self._is_whole(waiting[0])

    def _fits(self, needed: int, heads: slice | None) -> bool:
        if self._held + needed > self._most_held:
            return False
        if len(self._waiting) < _most_hops():
            return True
        groups = self._groups if heads is None else [heads]
        return all(len(self._waiting_of(x)) < _most_hops() for x in groups)

    @property
    def _all_wait(self) -> bool:
        return all(self._waiting_of(x) for x in self._groups)

    def _waiting_of(self, heads: slice | None) -> list[Result]:
        return [x for x in self._waiting if x.heads is None or x.heads == heads]

    def _merge_by_kernel(
        self,
        out: Tensor,
        lse: Tensor | None,
        sums: tuple[Tensor, Tensor | None] | None,
        sinks: Tensor | None = None,
    ) -> None:
        """Merge the stored results and the earlier sums, and write the new sums to `out` and `lse`.

        If `sums` is None, there must be at least one stored result for each group of heads.
        """
        from seqpar.kernels.flash_attention import HopResult, merge_hops  # imports Triton

        is_in_place = sums is not None and sums[0] is out and sums[1] is lse
        for heads in self._groups:
            waiting = self._waiting
            if heads is not None:
                waiting = [x.of(heads) for x in self._waiting_of(heads)]
            if not waiting:
                assert is_in_place
                continue
            into = _of_heads(out, heads), _of_heads(lse, heads)
            before: Sequence[Tensor | None] = into
            if not is_in_place:
                before = [_of_heads(x, heads) for x in sums or (None, None)]
            of_group = sinks if sinks is None or heads is None else sinks[heads]
            hops = [HopResult(x.out, x.lse, self._place(x.rows)) for x in waiting]
            merge_hops(hops, *into, *before, of_group)

    def _place(self, rows: slice | Rows) -> int | Tensor:
        if isinstance(rows, Rows):
            return rows.place(self._shape[1], self._device)
        return rows.start or 0


@cache
def _most_hops() -> int:
    from seqpar.kernels.flash_attention import MOST_HOPS  # imports Triton

    return MOST_HOPS


def _of_heads(x: Tensor | None, heads: slice | None) -> Tensor | None:
    return x if x is None or heads is None else x[:, :, heads]


def _held_bytes(result: Result) -> int:
    """Return the bytes of memory of a result, including columns that were added for its kernel."""
    out = result.out
    return out.untyped_storage().nbytes() if result.is_owned else out.nbytes


def _have_equal_dtypes(one: Result, other: Result) -> bool:
    if one.lse is None or other.lse is None:
        return one.lse is other.lse and one.out.dtype == other.out.dtype
    return one.out.dtype == other.out.dtype and one.lse.dtype == other.lse.dtype
