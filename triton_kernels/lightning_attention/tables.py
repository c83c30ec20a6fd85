"""Cut spans into segments, and list the segments in tables. One program computes the rows of a
segment in order.

A span is a stretch of adjacent rows of one document, and a segment is a stretch of adjacent rows of
a span. A walk is the order in which a recurrence computes the segments of a span: forward or from
the end. A state may enter the span where the walk begins, and the span's state may leave where the
walk ends. The state between two segments has a slot. Slots are numbered along the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..checks import check_indices, check_int, check_type

Ints = NDArray[np.int64]

# Kernels can read these as they are `tl.constexpr`; the host can index with them as they are
# integers. Columns of `segments`: a segment's rows; its span's rows; the index of the state that
# enters its span, or −1; and the slot of the state before it, or −1.
ROW_START, ROW_STOP, SPAN_START, SPAN_STOP, INCOMING, SLOT = map(tl.constexpr, range(6))
SEGMENT_WIDTH = tl.constexpr(6)
# Columns of `chains`: a span's slots, and the index of the state that leaves it, or −1.
SLOT_START, SLOT_STOP, OUTGOING = map(tl.constexpr, range(3))
CHAIN_WIDTH = tl.constexpr(3)

ALIGNMENT = 64  # a segment has a multiple of this number of rows, except for the last of a span
SHORTEST = 8 * ALIGNMENT  # rows that justify a separate state


@dataclass(frozen=True)
class SegmentTables:
    """The tables of one direction, int64 and on the device.

    Tables of segments are (n, 6), with the columns named above and the longest segment first.
    """

    leaving: int  # the number of states that leave their spans
    segments: Tensor  # all segments
    summed: Tensor  # segments whose state a later segment or the caller needs
    carried: Tensor  # segments of spans that a state enters
    chains: Tensor  # (n, 3): the spans that have slots, with the columns named above
    lengths: Tensor  # (slots,) the rows of each slot's segment
    # prepared calls (`launching.py`); freed with the tables
    prepared: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def placed(self, place: Callable[[Tensor], Tensor]) -> SegmentTables:
        """Return the same tables, where `place(table)` replaces each table."""
        return SegmentTables(
            self.leaving, place(self.segments), place(self.summed), place(self.carried),
            place(self.chains), place(self.lengths),
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        tables = self.segments, self.summed, self.carried, self.chains, self.lengths
        return SegmentTables, (
            self.leaving,
            *tables,
        )  # without prepared calls, which belong to this process


def segment_length(tokens: int, count: int) -> int:
    """Return the rows per segment, so that about `count` segments cover the tokens."""
    check_int("tokens", tokens, 0)
    check_int("count", count, 0)
    return max(SHORTEST, -(-tokens // (max(1, count) * ALIGNMENT)) * ALIGNMENT)


def segment_tables(
    edges: Ints, incoming: Ints, outgoing: Ints, length: int, device: torch.device, reverse: bool
) -> SegmentTables:
    """Return the tables of n spans edges[i] … edges[i + 1] in segments of `length` rows.

    `incoming` (n,) is the index of the state that enters each span, and `outgoing` (n,) the index
    of the state that leaves it; −1 means that there is none. `reverse` walks from the end.
    """
    check_indices("edges", edges)
    for name, array in (("incoming", incoming), ("outgoing", outgoing)):
        check_indices(name, array, edges.size - 1)
    check_int("length", length, 1)
    check_type("device", device, torch.device)
    starts, stops = edges[:-1], edges[1:]
    counts = -(-(stops - starts) // length)
    span = np.repeat(np.arange(counts.size), counts)
    index = np.arange(span.size) - (np.cumsum(counts) - counts)[span]
    has_slots = (counts > 1) | (outgoing >= 0)
    slotted = has_slots[span]
    table = np.empty((span.size, SEGMENT_WIDTH), np.int64)
    table[:, ROW_START] = starts[span] + index * length
    table[:, ROW_STOP] = np.minimum(table[:, ROW_START] + length, stops[span])
    table[:, SPAN_START], table[:, SPAN_STOP] = starts[span], stops[span]
    table[:, INCOMING] = incoming[span]
    table[:, SLOT] = np.where(slotted, np.cumsum(slotted) - 1, -1)
    lengths = table[:, ROW_STOP] - table[:, ROW_START]
    slots = np.where(has_slots, counts, 0)
    chains = np.empty((counts.size, CHAIN_WIDTH), np.int64)
    chains[:, SLOT_START], chains[:, SLOT_STOP] = np.cumsum(slots) - slots, np.cumsum(slots)
    chains[:, OUTGOING] = outgoing
    walked_last = index == (0 if reverse else counts[span] - 1)
    summed = slotted & (~walked_last | (outgoing[span] >= 0))
    carried = incoming[span] >= 0
    order = np.argsort(-lengths, kind="stable")
    segments = table[order], table[order][summed[order]], table[order][carried[order]]
    arrays = [*segments, chains[has_slots], lengths[slotted]]
    all_segments, of_sums, of_states, of_chains, of_slots = _to_device(arrays, device)
    leaving = int(outgoing.max(initial=-1)) + 1
    return SegmentTables(leaving, all_segments, of_sums, of_states, of_chains, of_slots)


def _to_device(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays as int64 tensors, in one copy."""
    buffer = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = buffer.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
