"""The conversion of requests to headers and payloads, and back.

The *tables* are the first three parts of a task's payload: the slices, the positions of the queries
and the positions of the keys.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.layout.masks.mask import Slices
from seqpar.servers.wire.header import DTYPES, Form, check_tables, form_of
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.messages import DtypeName, Operation, Places, RequestHeader, Step, Task
from seqpar.servers.wire.pages import Seen
from seqpar.servers.wire.payload import Buffer, Bytes, bytes_of, checksum
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient

_NAMES: dict[torch.dtype, DtypeName] = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_CAPS = Limits(tokens=2**40, bytes=2**40)  # the highest limits that a server can have
_TABLES = 3  # the number of tables
# Larger tables are not kept, because computing takes much longer than reading them.
_MAX_KEPT_TABLE_BYTES = 2**16
# An estimate of the data that backends derive from slices: `_PIECE_BYTES` for each `_PIECE_ROWS`
# query rows.
_PIECE_ROWS, _PIECE_BYTES = 64, 512


@dataclass(frozen=True)
class Packed:
    """A packed request, which can be sent to any server and any number of times."""

    task: Task
    step: Step | None  # None unless the request is a step of a cache
    checksum: int
    parts: list[Bytes]  # the payload's buffers; they share the memory of tensors on the CPU

    @property
    def form(self) -> Form:
        return form_of(self.task)

    def header(self, session: bytes, places: Places | None = None) -> RequestHeader:
        """Return the header for sending the request in a session."""
        return RequestHeader(session, self.task, self.step, self.checksum, places)


def _task(operation: Operation, q: Tensor, v: Tensor, options: CallOptions, **fields: Any) -> Task:
    """Return the sizes and options of a request. k and v must have the same numbers of rows and
    heads.
    """
    fields |= zip(("batch", "q_rows", "heads", "dim"), q.shape, strict=True)
    fields |= zip(("k_rows", "kv_heads", "value_dim"), v.shape[1:], strict=True)
    fields |= {"scale": options.scale, "softcap": options.softcap}
    return Task(operation=operation, dtype=_NAMES[q.dtype], **fields)


def pack(request: Request) -> Packed:
    """Convert a request to a header and payload. Raises a RequestError if no server could accept
    the request, whatever its limits.
    """
    task = _task(
        request.operation,
        request.q,
        request.v,
        request.options,
        slices=len(request.slices),
        deterministic=request.options.deterministic,
        exact_out=request.exact_out,
        has_dlse=request.output is not None and request.output.dlse is not None,
    )
    form_of(task).check(_LARGEST_CAPS)
    tables, before = request.slices.derived("packed tables", lambda: _tables(request))
    operands = bytes_of(request.tensors()[_TABLES:])
    return Packed(task, None, checksum(operands, before), [*tables, *operands])


def pack_step(
    cache: int,
    writes: int,
    start: int,
    operands: Sequence[Tensor],
    seen: Seen,
    scores: CallOptions,
) -> Packed:
    """Convert a decoding step to a header, which has its sizes and options, and a payload, the
    bytes of its tensors. The step writes k and v after the first `start` rows of a cache, and
    computes attention over the cache.

    `cache` identifies the cache. `writes` says how many steps the server has already computed for
    this cache. `operands` are q (B, T, Hq, D), k (B, rows, Hkv, D) and v (B, rows, Hkv, Dv).
    """
    parts = bytes_of(operands)
    fields: dict[str, Any] = {
        "slices": 0,
        "deterministic": True,
        "exact_out": True,
        "has_dlse": False,
    }
    task = _task("step", operands[0], operands[2], scores, **fields)
    return Packed(task, Step(cache, writes, start, *seen), checksum(parts), parts)


def _tables(request: Request) -> tuple[list[Bytes], int]:
    tables = bytes_of(request.tensors()[:_TABLES])
    return tables, checksum(tables)


class KeptSlices:
    """The slices of recent tasks, and the data that backends have derived from the slices."""

    def __init__(self, most: int = 2**26) -> None:
        # `nbytes` is an upper bound of the memory in use. It never exceeds `most`.
        self.nbytes, self._most = 0, most
        self._slices: OrderedDict[tuple[bytes, ...], tuple[Slices, int]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, tables: tuple[bytes, ...]) -> Slices:
        """Convert the bytes of three tables, the slices of a mask and the positions of queries and
        keys, to slices. Raises a RequestError if the tables are malformed.
        """
        if sum(map(len, tables)) > _MAX_KEPT_TABLE_BYTES:
            return _read_slices(*tables)
        with self._lock:
            if tables in self._slices:
                self._slices.move_to_end(tables)
                return self._slices[tables][0]
        slices = _read_slices(*tables)
        rows = int((slices.q_rows[:, 1] - slices.q_rows[:, 0]).sum())
        pieces = 2 * len(slices) + rows // _PIECE_ROWS
        size = 4 * sum(map(len, tables)) + _PIECE_BYTES * (1 + pieces)
        with self._lock:
            # False if another thread has added these tables meanwhile.
            if tables not in self._slices:
                self._slices[tables] = slices, size
                self.nbytes += size
            while self.nbytes > self._most:
                _, (_, dropped) = self._slices.popitem(last=False)
                self.nbytes -= dropped
        return slices


def unpack(
    task: Task, expected: int, buffers: Sequence[Buffer], backend: str, kept: KeptSlices
) -> Request:
    """Return the request of a task, given its checked header and its payload, the bytes of its
    tensors.

    `expected` is the checksum of the payload. `kept` stores the mask slices of earlier tasks, which
    need no second check. q, k, v and gradients are views of the payload's buffers, which must not
    change. Raises a RequestError that names a malformed part of the payload.
    """
    payload = form_of(task).request
    payload.check(buffers, expected)
    tables = tuple(bytes(buffer) for buffer in buffers[:_TABLES])
    slices = kept.read(tables)
    options = CallOptions(task.scale, task.softcap, backend, task.deterministic)
    q, k, v, *gradients = payload.tensors(buffers, _TABLES)
    output = None
    if task.operation == "backward":
        dout, lse, delta, *dlse = gradients
        output = OutputGradient(dout, None, lse, dlse[0] if dlse else None, delta)
    return Request(q, k, v, slices, options, task.exact_out, output)


def _read_slices(*tables: bytes) -> Slices:
    table, q_positions, k_positions = (
        np.frombuffer(bytearray(data), dtype)
        for data, dtype in zip(tables, (np.int64, np.int32, np.int32), strict=True)
    )
    columns = table.reshape(-1, 6)
    check_tables(columns, q_positions, k_positions)
    sent = np.empty((0, 2), np.int64)
    ranges = columns[:, 0:2], columns[:, 2:4], columns[:, 4:6]
    return Slices(*ranges, q_positions, k_positions, sent)
