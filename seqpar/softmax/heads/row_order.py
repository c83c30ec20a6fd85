"""The rows of several ranks in the order of the rank that they are merged into.

Its indices are copied to a device once, and kept: a copy in each call would make the host wait.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqpar.core.memo import Memo
from seqpar.layout.geometry import Geometry


class MergedRows:
    """How the rows of some ranks, those of one rank after another, become those of a merged rank.

    Attributes:
        counts: how many rows each rank has.
        total: how many the merged rank has.
    """

    def __init__(self, layout: Geometry, ranks: range) -> None:
        indices = [layout.token_indices(rank) for rank in ranks]
        self.counts = [index.size for index in indices]
        self.total = sum(self.counts)
        tokens = np.concatenate(indices)
        # 32 bits are half the memory of torch's usual indices, and faster to read.
        order = np.argsort(tokens).astype(np.int32 if self.total < 2**31 else np.int64)
        self._order = None if (tokens[1:] > tokens[:-1]).all() else order
        self._derived = Memo()

    @classmethod
    def of(cls, layout: Geometry, ranks: range) -> MergedRows:
        """Return them for these consecutive ranks, kept with the layout."""
        return layout.derived(("merged rows", ranks), lambda: cls(layout, ranks))

    @property
    def in_order(self) -> bool:
        """Whether the merged rows are just those of one rank after another."""
        return self._order is None

    def merge(self, x: Tensor) -> Tensor:
        """Return x (total, …), whose rows are those of one rank after another, in merged order."""
        return x if self.in_order else x.index_select(0, self._index("merge", x.device))

    def split(self, merged: Tensor) -> Tensor:
        """Undo `merge`: return the rows of one rank after another."""
        return (
            merged if self.in_order else merged.index_select(0, self._index("split", merged.device))
        )

    def _index(self, way: str, device: torch.device) -> Tensor:
        return self._derived((way, device), lambda: self._make_index(way).to(device))

    def _make_index(self, way: str) -> Tensor:
        assert self._order is not None
        if way == "merge":
            return torch.from_numpy(self._order)
        inverse = np.empty_like(self._order)
        inverse[self._order] = np.arange(self.total, dtype=inverse.dtype)
        return torch.from_numpy(inverse)
