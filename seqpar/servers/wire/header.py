"""The sizes of a *payload*, the bytes of a request's tensors. They are computed from the request's
*header*, and are checked before memory is allocated.

No size can overflow, because Python's integers are unbounded. The text of an error names the field
and the allowed values. The text can contain numbers of the header, but never data of the payload.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.ranges import UNLIMITED
from seqpar.servers.wire.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_SLICES, Limits
from seqpar.servers.wire.messages import DtypeName, Task
from seqpar.servers.wire.payload import Payload, PayloadTensor, RequestError

DTYPES: dict[DtypeName, torch.dtype] = {name: getattr(torch, name) for name in get_args(DtypeName)}
_MAX_KEPT_FORMS = 256


class Form:
    """The names, dtypes and shapes of the tensors in a task's payload and in its result."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._faults: dict[Limits, str | None] = {}

    @cached_property
    def request(self) -> Payload:
        task, (dtype, exact, rows, keys) = self._task, self._shapes()
        operands = [
            PayloadTensor("q", dtype, (*rows, task.dim)),
            PayloadTensor("k", dtype, (*keys, task.dim)),
            PayloadTensor("v", dtype, (*keys, task.value_dim)),
        ]
        if task.operation == "step":
            return Payload(operands)
        tensors = [
            PayloadTensor("slices", torch.int64, (task.slices, 6)),
            PayloadTensor("q_positions", torch.int32, (task.q_rows,)),
            PayloadTensor("k_positions", torch.int32, (task.k_rows,)),
            *operands,
        ]
        if task.operation == "backward":
            tensors += [PayloadTensor("dout", dtype, (*rows, task.value_dim))]
            tensors += [PayloadTensor("lse", exact, rows), PayloadTensor("delta", exact, rows)]
            tensors += [PayloadTensor("dlse", exact, rows)] if task.has_dlse else []
        return Payload(tensors)

    @cached_property
    def result(self) -> Payload:
        task, (dtype, exact, rows, keys) = self._task, self._shapes()
        if task.operation != "backward":
            out = exact if task.exact_out else dtype
            outputs = ("out", out, (*rows, task.value_dim)), ("lse", exact, rows)
            return Payload([PayloadTensor(*output) for output in outputs])
        dk, dv = (*keys, task.dim), (*keys, task.value_dim)
        shapes = {"dq": (*rows, task.dim), "dk": dk, "dv": dv}
        return Payload([PayloadTensor(name, exact, shape) for name, shape in shapes.items()])

    def _shapes(self) -> tuple[torch.dtype, torch.dtype, tuple[int, ...], tuple[int, ...]]:
        """Return the dtype of q, k and v, the dtype of lse and gradients, and the shapes of q and k
        without the head dim.
        """
        task, dtype = self._task, DTYPES[self._task.dtype]
        rows = task.batch, task.q_rows, task.heads
        keys = task.batch, task.k_rows, task.kv_heads
        return dtype, accumulator_dtype(dtype), rows, keys

    def check(self, limits: Limits) -> None:
        """Raise a RequestError that names the field if a field is wrong or above a limit."""
        if limits not in self._faults:
            self._faults[limits] = self._fault(limits)
        if (fault := self._faults[limits]) is not None:
            raise RequestError(fault)

    def _fault(self, limits: Limits) -> str | None:
        task, tokens = self._task, limits.tokens
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
            if not least <= (value := getattr(task, name)) <= most:
                return f"{name} must be from {least} to {most} here, got {value}"
        for name in ("q_rows", "k_rows"):
            if (rows := task.batch * getattr(task, name)) > tokens:
                return f"{name} of all sequences in the batch must be at most {tokens}, got {rows}"
        if task.heads % task.kv_heads:
            return f"heads must be a multiple of kv_heads: {task.heads}, {task.kv_heads}"
        if not math.isfinite(task.scale):
            return "scale must be finite"
        if not 0 <= task.softcap < math.inf:
            return "softcap must be finite and not negative"
        for kind, payload in (("payload", self.request), ("result", self.result)):
            if payload.room > limits.bytes:
                return f"{kind} must have at most {limits.bytes} bytes here, got {payload.room}"
        return None


form_of = lru_cache(_MAX_KEPT_FORMS)(Form)


def check_tables(
    table: NDArray[np.int64], q_positions: NDArray[np.int32], k_positions: NDArray[np.int32]
) -> None:
    """Check the tables of a task, or raise a RequestError.

    The tables are the slices of a mask, and the positions of queries and keys. A slice is a range
    of query rows and a range of key rows, between which attention is computed. Each slice must lie
    within the rows of q and k, and positions must ascend within each slice.

    Slices can overlap, so a small request could cause any amount of work. The number of pairs of a
    query row and a key row, summed over the slices, is therefore limited to twice the number of all
    such pairs. A causal mask with a prefix needs this factor of two.
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
        # For each row, the number of rows so far whose position is not above the previous position.
        falls = np.zeros(max(1, positions.size), np.int64)
        np.cumsum(np.diff(positions) <= 0, out=falls[1:])
        if (falls[stop - 1] != falls[start]).any():
            raise RequestError(f"{name[0]}_positions must ascend within a slice")
    low, high = table[:, 4], table[:, 5]
    if not ((low <= high) & (low >= -2 * UNLIMITED) & (high <= 2 * UNLIMITED)).all():
        raise RequestError("slices: their bands must ascend, and be within 2**41")
    rows, keys = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2]
    pairs = float(np.dot(rows.astype(np.float64), keys.astype(np.float64)))
    if pairs > 2 * q_positions.size * k_positions.size * (1 + 1e-9):
        reason = "together they have more than twice all pairs of rows"
        raise RequestError(f"slices must not overlap: {reason}")
