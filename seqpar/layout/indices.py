"""The indices and positions of a rank's tokens, and the operators that torch.compile traces."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqpar.layout.geometry import Geometry
from seqpar.layout.handle import from_handle

_SCHEMA = "(Tensor layout, int rank, SymInt tokens) -> Tensor"
torch.library.define("seqpar::token_indices", _SCHEMA)
torch.library.define("seqpar::position_ids", _SCHEMA)


def token_indices(geometry: Geometry, rank: int) -> Tensor:
    """Return (T_local,) int64: the index in the packed batch of each of a rank's tokens."""
    return torch.from_numpy(geometry.token_indices(rank))


def position_ids(geometry: Geometry, rank: int) -> Tensor:
    """Return (T_local,) int64: the position of each of a rank's tokens in its document."""
    return torch.from_numpy(geometry.holdings[rank].positions.astype(np.int64))


@torch.library.impl("seqpar::token_indices", "cpu")
def _token_indices(layout: Tensor, rank: int, tokens: int) -> Tensor:
    return token_indices(from_handle(layout), rank)


@torch.library.impl("seqpar::position_ids", "cpu")
def _position_ids(layout: Tensor, rank: int, tokens: int) -> Tensor:
    return position_ids(from_handle(layout), rank)


@torch.library.register_fake("seqpar::token_indices")  # type: ignore[untyped-decorator]
@torch.library.register_fake("seqpar::position_ids")  # type: ignore[untyped-decorator]
def _fake(layout: Tensor, rank: int, tokens: int) -> Tensor:
    return layout.new_empty((tokens,))
