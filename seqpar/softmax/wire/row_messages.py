"""The local rows that make up a block which travels, with their indices on each device."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.ranges import ranges


class Rows:
    """Ranges of local rows that, one after another, make up a block.

    Indices are copied to a device once, and kept: a copy in each call would make the host wait.

    Attributes:
        count: how many rows there are.
        is_range: whether they are one range, so that those of a contiguous tensor are a view.
        reach: the range from the lowest row to behind the highest; (0, 0) if there are none.
    """

    def __init__(self, ranges: Ints) -> None:
        """Keep the ranges, (m, 2)."""
        self._table = ranges
        self.count = int((ranges[:, 1] - ranges[:, 0]).sum())
        self.is_range = len(ranges) == 1
        self.reach = (int(ranges[:, 0].min()), int(ranges[:, 1].max())) if self.count else (0, 0)
        self._range = slice(*ranges[0].tolist()) if self.is_range else slice(0)
        self._on_devices: dict[torch.device, Tensor] = {}

    def pack(self, *parts: Tensor) -> Tensor:
        """Return these rows of tensors (T, B, H, D), side by side: contiguous (n, B, H, ΣD).

        Of a single tensor it is a view where that is possible.
        """
        if self.is_range:
            views = [x[self._range] for x in parts]
            return torch.cat(views, -1) if len(views) > 1 else views[0].contiguous()
        dims = [x.shape[3] for x in parts]
        packed = parts[0].new_empty((self.count, *parts[0].shape[1:3], sum(dims)))
        indices = self._indices(packed.device)
        for x, part in zip(parts, packed.split_with_sizes(dims, -1), strict=True):
            torch.index_select(x, 0, indices, out=part)
        return packed

    def add(self, block: Tensor, total: Tensor) -> None:
        """Add a block (n, …) to these rows of the total (T, …)."""
        if self.is_range:
            total[self._range].add_(block)
        else:
            total.index_add_(0, self._indices(total.device), block)

    def select(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the rows of x (B, T, …), as one contiguous tensor (B, n, …).

        They are written to `out`, if that is given; else it is a view where that is possible.
        """
        if not self.is_range:
            return torch.index_select(x, 1, self._indices(x.device), out=out)
        selected = x[:, self._range]
        return selected.contiguous() if out is None else out.copy_(selected)

    def local(self, device: torch.device) -> slice | Tensor:
        """Return where they are among the local rows: a range, or indices on this device."""
        return self._range if self.is_range else self._indices(device)

    def _indices(self, device: torch.device) -> Tensor:
        if (found := self._on_devices.get(device)) is None:
            found = self._on_devices[device] = torch.from_numpy(ranges(*self._table.T)).to(device)
        return found
