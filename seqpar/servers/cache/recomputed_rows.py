"""Rows of a cache of which home keeps no copy: who decodes can make them again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqpar.core.arguments import shown
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.softmax.compute.call_options import CallOptions

_CPU = torch.device("cpu")
Source = Callable[[int, int], object]  # keys and values of the rows start … stop − 1


class Rebuilt:
    """Rows with the calls of `Pages`; what was written is kept until `settle`.

    Attributes:
        shape: of the rows.
        nbytes: how many bytes their pages take on a server.
    """

    def __init__(self, shape: RowShape, source: Source) -> None:
        """`source` returns (B, rows, Hkv, D and Dv) of what was settled."""
        self.shape, self.nbytes = shape, 0
        self._source = source
        self._recent: tuple[int, Tensor, Tensor] | None = None

    def reserve(self, rows: int) -> None:
        """Expect so many rows in all."""
        self.nbytes = max(self.nbytes, self.shape.nbytes(rows))

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Keep these rows, from `start` on, for now."""
        k, v = (x.detach().to(_CPU, copy=True) for x in (k, v))
        self._recent = start, k, v

    def settle(self) -> None:
        """Keep nothing: the step is done."""
        self._recent = None

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of these rows, asked for where they are not kept."""
        first, *kept = self._recent or (stop, *self._nothing())
        known = max(start, min(first, stop))
        older = self._ask(start, known) if start < known else self._nothing()
        newer = (x[:, known - first : stop - first] for x in kept)
        k, v = (torch.cat([x, y], 1) for x, y in zip(older, newer, strict=True))
        return k, v

    def attend(
        self, q: Tensor, length: int, seen: Seen, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        """Return attention over the first `length` rows, as `Pages.attend` does."""
        rows = length if q.numel() else 0
        pages = Pages(self.shape, _CPU)
        pages.reserve(rows)
        pages.write(0, *self.read(0, rows))
        return pages.attend(q, rows, seen, options)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        return Pages(self.shape, _CPU).read(0, 0)

    def _ask(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        found, rows = self._source(start, stop), stop - start
        dtype, batch, heads, *dims = self.shape
        shapes = [(batch, rows, heads, dim) for dim in dims]
        if not (
            isinstance(found, tuple)
            and [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in found]
            == [(shape, dtype) for shape in shapes]
        ):
            expected = f"k and v of {rows} tokens, {shapes[0]} and {shapes[1]} of {dtype}"
            raise ValueError(f"rebuild must return {expected}, got {shown(found)}")
        k, v = (x.detach().to(_CPU) for x in found)
        return k, v
