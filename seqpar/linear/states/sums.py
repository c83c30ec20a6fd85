"""Sums of states that decay: the arithmetic of all exchanges of states.

    sums[g] = Σ λ^rows · states[member],

over the members of group g, each with its own number of rows. Both are (n, B, Hkv, D, Dv).

All groups are one embedding bag, a weighted sum of rows without atomic additions: 32 documents in
zigzag on 8 ranks take 38 operators in forward, not the 389 of one sum per source and station.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.core.arguments import Ints
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.ranges import count_up, ranges
from seqpar.linear.routes import StateSums
from seqpar.linear.states.options import StateOptions

Sum = Callable[[Tensor], Tensor]  # states -> their sums


class SumsOnDevice:
    """Several sums on one device, whose weights are computed together.

    Tables are copied to it once, here: a copy in each call would make the host wait.
    """

    def __init__(
        self, sums: Sequence[StateSums], shape: OperandShape, device: torch.device
    ) -> None:
        # A bag is a sum for one sequence of the batch and one head: of rows of D·Dv elements.
        self._dtype, lanes = accumulator_dtype(shape.dtype), shape.batch * shape.kv_heads
        self._sums, rows, lanes_of = [], [], []
        for each in sums:
            count, start = (np.repeat(x, lanes) for x in (each.counts, _starts(each.counts)))
            member = ranges(start, start + count)
            lane = np.repeat(count_up(np.full_like(each.counts, lanes)), count)
            members, edges = each.members[member] * lanes + lane, np.r_[0, np.cumsum(count)]
            on_device = (torch.from_numpy(x).to(device) for x in (members, edges))
            self._sums.append(partial(_sum, each.counts.size, *on_device))
            rows.append(each.rows[member])
            lanes_of.append(lane)
        self._sizes = [x.size for x in rows]
        columns = np.concatenate(rows).astype(np.float64), np.concatenate(lanes_of) % shape.kv_heads
        self._rows, self._heads = (torch.from_numpy(x).to(device) for x in columns)

    def weigh(self, options: StateOptions) -> list[Sum]:
        """Return the sums, as functions of states; what they need besides is computed here."""
        weights: Sequence[Tensor | None] = [None] * len(self._sums)
        if options.log_decay is not None:
            powers = torch.exp(self._rows * options.log_decay[self._heads])
            weights = powers.to(self._dtype).split(self._sizes)
        return list(map(partial, self._sums, weights))


def _sum(
    groups: int, members: Tensor, edges: Tensor, weights: Tensor | None, states: Tensor
) -> Tensor:
    matrix = states.reshape(-1, states.shape[-2] * states.shape[-1])
    # An embedding bag is a weighted sum of rows, for any number of bags in one pass (mode 0: sum).
    sums = torch.embedding_bag(
        matrix, members, edges, mode=0, per_sample_weights=weights, include_last_offset=True
    )[0]
    return sums.view(groups, *states.shape[1:])


def _starts(counts: Ints) -> Ints:
    return np.cumsum(counts) - counts
