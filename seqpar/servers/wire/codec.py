"""Converts requests and results to headers and payloads, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from seqpar.layout.masks.mask import Slices
from seqpar.servers.wire.header import DTYPES, Form, check_tables, form_of
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.pages import Seen
from seqpar.servers.wire.payload import Buffer, Bytes, Payload, bytes_of, checksum
from seqpar.servers.wire.protocol import DtypeName, StepRequest, Task
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient

_NAMES: dict[torch.dtype, DtypeName] = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_CAPS = Limits(tokens=2**40, bytes=2**40)  # that a server may have
_TABLES = 3  # the first parts of a request: slices, and positions of queries and of keys
_MAX_KEPT_TABLE_BYTES = 2**16  # a larger task computes for much longer than it reads tables
_PIECE_ROWS, _PIECE_BYTES = 64, 512  # of the data that backends derive from slices and keep


@dataclass(frozen=True)
class Packed:
    """A request that can be sent to any server any number of times."""

    header: Task | StepRequest  # with generation and number 0
    parts: list[Bytes]  # the payload's buffers; a CPU tensor's buffer shares its memory
    form: Form  # the sizes that the header promises

    def numbered(self, generation: int, number: int, **places: Any) -> Task | StepRequest:
        """Return the header for one attempt; `places` are other fields to set."""
        fields = {"generation": generation, "request": number, **places}
        return msgspec.structs.replace(self.header, **fields)


def _common_fields(q: Tensor, v: Tensor, options: CallOptions) -> dict[str, Any]:
    """Return the fields that headers of tasks and of steps share; v has the rows and heads of k."""
    fields: dict[str, Any] = {"generation": 0, "request": 0, "dtype": _NAMES[q.dtype]}
    fields |= zip(("batch", "q_rows", "heads", "dim"), q.shape, strict=True)
    fields |= zip(("k_rows", "kv_heads", "value_dim"), v.shape[1:], strict=True)
    return fields | {"scale": options.scale, "softcap": options.softcap}


def pack(request: Request) -> Packed:
    """Pack a request; raise a RequestError if no server could accept it."""
    header = Task(
        **_common_fields(request.q, request.v, request.options),
        op=request.operation,
        slices=len(request.slices),
        deterministic=request.options.deterministic,
        exact_out=request.exact_out,
        has_dlse=request.output is not None and request.output.dlse is not None,
        checksum=0,
    )
    form = form_of(header)
    form.check(_LARGEST_CAPS)
    tables, before = request.slices.derived("packed tables", lambda: _tables(request))
    operands = bytes_of(request.tensors()[_TABLES:])
    header = msgspec.structs.replace(header, checksum=checksum(operands, before))
    return Packed(header, [*tables, *operands], form)


def pack_step(
    cache: int,
    writes: int,
    start: int,
    operands: Sequence[Tensor],
    seen: Seen,
    scores: CallOptions,
) -> Packed:
    """Pack a step that stores k and v after the first `start` rows, and then attends.

    `operands` are q (B, T, Hq, D), k (B, rows, Hkv, D) and v (B, rows, Hkv, Dv).
    """
    parts = bytes_of(operands)
    header = StepRequest(
        **_common_fields(operands[0], operands[2], scores),
        **seen._asdict(),
        cache=cache,
        writes=writes,
        start=start,
        checksum=checksum(parts),
    )
    return Packed(header, parts, form_of(header))


def _tables(request: Request) -> tuple[list[Bytes], int]:
    tables = bytes_of(request.tensors()[:_TABLES])
    return tables, checksum(tables)


class KeptSlices:
    """Keeps the slices of a client's last tasks, with the data that backends derived from them."""

    def __init__(self, most: int = 2**22) -> None:
        self.nbytes, self._most = 0, most  # an upper bound of the bytes that they take, and its cap
        self._slices: OrderedDict[tuple[bytes, ...], tuple[Slices, int]] = OrderedDict()

    def clear(self) -> None:
        self._slices.clear()
        self.nbytes = 0

    def read(self, tables: tuple[bytes, ...]) -> Slices:
        """Convert tables to slices; raise a RequestError if they are malformed."""
        if sum(map(len, tables)) > _MAX_KEPT_TABLE_BYTES:
            return _read_slices(*tables)
        slices, size = self._slices.pop(tables, None) or (None, 0)
        if slices is None:
            slices = _read_slices(*tables)
            rows = int((slices.q_rows[:, 1] - slices.q_rows[:, 0]).sum())
            pieces = 2 * len(slices) + rows // _PIECE_ROWS
            size = 4 * sum(map(len, tables)) + _PIECE_BYTES * (1 + pieces)
            self.nbytes += size
        self._slices[tables] = slices, size
        while self.nbytes > self._most:
            _, (_, dropped) = self._slices.popitem(last=False)
            self.nbytes -= dropped
        return slices


_OWN_SLICES = KeptSlices()  # of tasks without a client


def unpack(
    task: Task, buffers: Sequence[Buffer], backend: str, kept: KeptSlices | None = None
) -> Request:
    """Make a request from a checked header and its payload.

    `kept` has the slices of this client's earlier tasks. The slices are copied; q, k, v and
    gradients are views of the buffers, which must not change. A RequestError names the part of the
    payload that is malformed.
    """
    payload = form_of(task).request
    payload.check(buffers, task.checksum)
    tables = tuple(bytes(buffer) for buffer in buffers[:_TABLES])
    slices = (kept or _OWN_SLICES).read(tables)
    options = CallOptions(task.scale, task.softcap, backend, task.deterministic)
    q, k, v, *gradients = payload.tensors(buffers, _TABLES)
    output = None
    if task.op == "backward":
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


def unpack_result(
    payload: Payload, buffers: Sequence[Buffer], expected: int, pinned: bool = False
) -> list[Tensor]:
    """Return copies of a result's tensors; raise a RequestError if the payload is damaged."""
    copies = payload.copies(list(buffers), pinned)
    payload.check(copies, expected)
    return payload.tensors(copies)
