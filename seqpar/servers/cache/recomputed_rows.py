"""Rows of a cache that are not copied, because the caller can compute them again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqpar.core.arguments import shown
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.softmax.compute.call_options import CallOptions

_CPU = torch.device("cpu")
Source = Callable[[int, int], object]  # returns keys and values of rows start … stop − 1


class RecomputedRows:
    """Rows with the interface of `Pages`. Written rows are kept only until `settle`.

    Attributes:
        nbytes: bytes of their pages on a server.
    """

    def __init__(self, shape: RowShape, source: Source) -> None:
        """`source` returns settled rows: k (B, rows, Hkv, D) and v (B, rows, Hkv, Dv)."""
        self.shape, self.nbytes = shape, 0
        self._source = source
        self._recent: tuple[int, Tensor, Tensor] | None = None

    def reserve(self, rows: int) -> None:
        """Expect the first `rows` rows."""
        self.nbytes = max(self.nbytes, self.shape.nbytes(rows))

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Keep rows from `start` on until `settle`."""
        k, v = (x.detach().to(_CPU, copy=True) for x in (k, v))
        self._recent = start, k, v

    def settle(self) -> None:
        """Drop the kept rows: the step is done."""
        self._recent = None

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of these rows, computed again if they are not kept."""
        first, *kept = self._recent or (stop, *self._nothing())
        known = max(start, min(first, stop))
        older = self._recompute(start, known) if start < known else self._nothing()
        newer = (x[:, known - first : stop - first] for x in kept)
        k, v = (torch.cat([x, y], 1) for x, y in zip(older, newer, strict=True))
        return k, v

    def attend(
        self, q: Tensor, length: int, seen: Seen, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        """Return attention over the first `length` rows; see `Pages.attend`."""
        rows = length if q.numel() else 0
        pages = Pages(self.shape, _CPU)
        pages.reserve(rows)
        pages.write(0, *self.read(0, rows))
        return pages.attend(q, rows, seen, options)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        return Pages(self.shape, _CPU).read(0, 0)

    def _recompute(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        rebuilt, rows = self._source(start, stop), stop - start
        dtype, batch, heads, *dims = self.shape
        shapes = [(batch, rows, heads, dim) for dim in dims]
        if not (
            isinstance(rebuilt, tuple)
            and [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in rebuilt]
            == [(shape, dtype) for shape in shapes]
        ):
            expected = f"k and v of {rows} tokens, {shapes[0]} and {shapes[1]} of {dtype}"
            raise ValueError(f"rebuild must return {expected}, got {shown(rebuilt)}")
        k, v = (x.detach().to(_CPU) for x in rebuilt)
        return k, v
