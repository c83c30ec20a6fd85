"""The operators that number a rank's tokens: torch.compile takes them as it takes attention."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqpar.layout.handle import from_handle

_SCHEMA = "(Tensor layout, int rank, SymInt tokens) -> Tensor"
torch.library.define("seqpar::token_indices", _SCHEMA)
torch.library.define("seqpar::position_ids", _SCHEMA)


@torch.library.impl("seqpar::token_indices", "cpu")
def _token_indices(layout: Tensor, rank: int, tokens: int) -> Tensor:
    return torch.from_numpy(from_handle(layout).token_indices(rank))


@torch.library.impl("seqpar::position_ids", "cpu")
def _position_ids(layout: Tensor, rank: int, tokens: int) -> Tensor:
    return torch.from_numpy(from_handle(layout).holdings[rank].positions.astype(np.int64))


@torch.library.register_fake("seqpar::token_indices")  # type: ignore[untyped-decorator]
@torch.library.register_fake("seqpar::position_ids")  # type: ignore[untyped-decorator]
def _fake(layout: Tensor, rank: int, tokens: int) -> Tensor:
    return layout.new_empty((tokens,))
