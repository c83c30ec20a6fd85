"""Cutting spans into segments, the stretches of rows that one program walks, and the tables in which kernels find them.

A span is a stretch of rows of one document. A recurrence goes through a span's segments in one direction, forward or from
the end; a state enters the span from where the walk begins, and the span's own leaves it where the walk ends. States between
segments have a slot each, numbered along the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

FIRST, STOP, SPAN_FIRST, SPAN_STOP, INCOMING, SLOT = range(6)  # of a segment
SEGMENT_WIDTH, CHAIN_WIDTH = 6, 3
ALIGNMENT = 64  # rows; the last segment of a span has what remains
SHORTEST = 8 * ALIGNMENT  # a segment is worth a state of its own


@dataclass(frozen=True)
class Plan:
    """The tables of one direction, int64 and on the device; (n, 6) segments have the columns above and the longest first."""

    leaving: int  # how many states leave their spans
    segments: Tensor  # all
    summed: Tensor  # whose own state another segment needs, or what comes after the span
    carried: Tensor  # of spans that a state enters
    chains: Tensor  # (spans, 3): a span's first slot, the slot after its last, and where its state goes, or −1
    lengths: Tensor  # (slots,) rows


def segment_rows(tokens: int, wanted: int) -> int:
    """The length of segments of which about `wanted` cover so many rows."""
    return max(SHORTEST, -(-tokens // (max(1, wanted) * ALIGNMENT)) * ALIGNMENT)


def cut(edges: Ints, incoming: Ints, outgoing: Ints, rows: int, device: torch.device, reverse: bool) -> Plan:
    """Spans edges[i] … edges[i + 1] in segments of `rows` rows.

    `incoming` (n,) says which of the states that enter is a span's, and `outgoing` (n,) where its own goes; −1 is none.
    """
    starts, stops = edges[:-1], edges[1:]
    counts = -(-(stops - starts) // rows)
    span = np.repeat(np.arange(counts.size), counts)
    index = np.arange(span.size) - (np.cumsum(counts) - counts)[span]
    chained = (counts > 1) | (outgoing >= 0)
    slotted = chained[span]
    table = np.empty((span.size, SEGMENT_WIDTH), np.int64)
    table[:, FIRST] = starts[span] + index * rows
    table[:, STOP] = np.minimum(table[:, FIRST] + rows, stops[span])
    table[:, SPAN_FIRST], table[:, SPAN_STOP], table[:, INCOMING] = starts[span], stops[span], incoming[span]
    table[:, SLOT] = np.where(slotted, np.cumsum(slotted) - 1, -1)
    last = index == (0 if reverse else counts[span] - 1)
    lengths = table[:, STOP] - table[:, FIRST]
    slots = np.where(chained, counts, 0)
    chains = np.stack([np.cumsum(slots) - slots, np.cumsum(slots), outgoing], 1)[chained]
    order = np.argsort(-lengths, kind="stable")
    summed, carried = slotted & (~last | (outgoing[span] >= 0)), incoming[span] >= 0
    arrays = [table[order], table[order][summed[order]], table[order][carried[order]], chains, lengths[slotted]]
    return Plan(int(outgoing.max(initial=-1)) + 1, *_to_device(arrays, device))


def _to_device(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as int64 tensors, in one copy."""
    buffer = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = buffer.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
