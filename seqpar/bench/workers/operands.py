"""Random q, k, v and dout of any tokens of a batch, the same on whichever rank they are made."""

from __future__ import annotations

import torch
from torch import Tensor

_TOKENS_PER_DRAW = 4096  # so that random numbers need little memory
Q, K, V, DOUT = range(4)


def draw(which: int, indices: Tensor, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows of one of the tensors, (tokens, heads, dim), on the device of `indices`.

    Tokens have the same rows on all devices of one type.
    """
    device, blocks = indices.device, indices // _TOKENS_PER_DRAW
    found = torch.empty(len(indices), heads, dim, dtype=dtype, device=device)
    generator = torch.Generator(device)
    for block in blocks.unique().tolist():
        generator.manual_seed(4 * block + which)
        shape = _TOKENS_PER_DRAW, heads, dim
        drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
        rows = (blocks == block).nonzero().flatten()
        found[rows] = drawn[indices[rows] % _TOKENS_PER_DRAW]
    return found
