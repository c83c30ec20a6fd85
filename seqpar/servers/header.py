"""What a task's header promises: the sizes of its payload, checked before anything is allocated.

All arithmetic is on Python's integers, which do not overflow. An error names the argument and what
is allowed; it shows numbers of the header, never what a payload holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from seqpar.dtypes import accumulator_dtype
from seqpar.layout.ranges import UNLIMITED
from seqpar.servers.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_SLICES, Limits
from seqpar.servers.protocol import DtypeName, Task

DTYPES: dict[DtypeName, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ALIGNMENT = 64  # bytes, of a part in an arena


class RequestError(ValueError):
    """A request is malformed, or above a cap."""


class Part(NamedTuple):
    """One tensor of a payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def request_parts(task: Task) -> list[Part]:
    """Return what the payload of a request has, in order."""
    dtype = DTYPES[task.dtype]
    exact = accumulator_dtype(dtype)
    rows = task.batch, task.q_rows, task.heads
    keys = task.batch, task.k_rows, task.kv_heads
    found = [
        Part("slices", torch.int64, (task.slices, 6)),
        Part("q_positions", torch.int32, (task.q_rows,)),
        Part("k_positions", torch.int32, (task.k_rows,)),
        Part("q", dtype, (*rows, task.dim)),
        Part("k", dtype, (*keys, task.dim)),
        Part("v", dtype, (*keys, task.value_dim)),
    ]
    if task.op == "backward":
        found += [Part("dout", dtype, (*rows, task.value_dim))]
        found += [Part("lse", exact, rows), Part("delta", exact, rows)]
        found += [Part("dlse", exact, rows)] if task.has_dlse else []
    return found


def result_parts(task: Task) -> list[Part]:
    """Return what the payload of a result has, in order."""
    dtype = DTYPES[task.dtype]
    exact = accumulator_dtype(dtype)
    rows = task.batch, task.q_rows, task.heads
    keys = task.batch, task.k_rows, task.kv_heads
    if task.op == "forward":
        out = exact if task.exact_out else dtype
        return [Part("out", out, (*rows, task.value_dim)), Part("lse", exact, rows)]
    return [
        Part("dq", exact, (*rows, task.dim)),
        Part("dk", exact, (*keys, task.dim)),
        Part("dv", exact, (*keys, task.value_dim)),
    ]


def placed(parts: Sequence[Part]) -> tuple[list[int], int]:
    """Return where each part begins in an arena, and how many bytes they take together."""
    places, end = [], 0
    for part in parts:
        places.append(end)
        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return places, end


def room(task: Task) -> tuple[list[int], int]:
    """Return the bytes of each part of a request, and what it takes in all with its result."""
    parts = request_parts(task)
    return [part.nbytes for part in parts], placed(parts)[1] + placed(result_parts(task))[1]


def check_header(task: Task, limits: Limits) -> None:
    """Raise a RequestError that names what is wrong with a header, or above a cap."""
    tokens = limits.tokens
    caps = {
        "batch": (1, tokens),
        "q_rows": (0, tokens),
        "k_rows": (0, tokens),
        "heads": (1, MAX_HEADS),
        "kv_heads": (1, MAX_HEADS),
        "dim": (1, MAX_HEAD_DIM),
        "value_dim": (1, MAX_HEAD_DIM),
        "slices": (0, MAX_SLICES),
    }
    for name, (least, most) in caps.items():
        if not least <= (found := getattr(task, name)) <= most:
            raise RequestError(f"{name} must be from {least} to {most} here, got {found}")
    for name in ("q_rows", "k_rows"):
        if (found := task.batch * getattr(task, name)) > tokens:
            raise RequestError(f"{name}: a batch must have at most {tokens} in all, got {found}")
    if task.heads % task.kv_heads:
        raise RequestError(f"heads must be a multiple of kv_heads: {task.heads}, {task.kv_heads}")
    if not math.isfinite(task.scale):
        raise RequestError("scale must be finite")
    if not 0 <= task.softcap < math.inf:
        raise RequestError("softcap must be finite and not negative")
    for kind, parts in (("payload", request_parts(task)), ("result", result_parts(task))):
        if (size := placed(parts)[1]) > limits.bytes:
            raise RequestError(f"{kind}: {limits.bytes} bytes at most are taken here, got {size}")


def check_sizes(parts: Sequence[Part], sizes: Sequence[int]) -> None:
    """Raise a RequestError unless the frames of a payload have the sizes that are promised."""
    if len(sizes) != len(parts):
        raise RequestError(f"payload must have {len(parts)} parts, got {len(sizes)}")
    for part, size in zip(parts, sizes, strict=True):
        if size != part.nbytes:
            expected = f"{part.nbytes} bytes for {part.shape} of {part.dtype}"
            raise RequestError(f"{part.name} must have {expected}, got {size}")


def check_tables(
    table: NDArray[np.int64], q_positions: NDArray[np.int32], k_positions: NDArray[np.int32]
) -> None:
    """Raise a RequestError unless slices lie within the rows, and positions ascend in each.

    Their rectangles together have at most twice all pairs of rows, what a causal mask with a prefix
    may have; else some would overlap, and a small request could cost any amount of work.
    """
    for name, columns, positions in (
        ("q rows", table[:, 0:2], q_positions),
        ("k rows", table[:, 2:4], k_positions),
    ):
        start, stop = columns.T
        if not ((start >= 0) & (start < stop) & (stop <= positions.size)).all():
            raise RequestError(f"slices: their {name} must ascend, within {positions.size} rows")
        if (positions < 0).any():
            raise RequestError(f"{name[0]}_positions must not be negative")
        falls = np.zeros(max(1, positions.size), np.int64)  # up to each row
        np.cumsum(np.diff(positions) <= 0, out=falls[1:])
        if (falls[stop - 1] != falls[start]).any():
            raise RequestError(f"{name[0]}_positions must ascend within a slice")
    low, high = table[:, 4], table[:, 5]
    if not ((low <= high) & (low >= -2 * UNLIMITED) & (high <= 2 * UNLIMITED)).all():
        raise RequestError("slices: their bands must ascend, and be within 2**41")
    rows, keys = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2]
    pairs = float(np.dot(rows.astype(np.float64), keys.astype(np.float64)))
    if pairs > 2 * q_positions.size * k_positions.size * (1 + 1e-9):
        raise RequestError("slices must not overlap: together they have more pairs than there are")
