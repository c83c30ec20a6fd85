"""Requests and results as headers with payloads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from seqpar.servers.header import (
    DTYPES,
    Part,
    RequestError,
    check_header,
    check_sizes,
    check_tables,
    placed,
    request_parts,
    result_parts,
)
from seqpar.servers.limits import Limits
from seqpar.servers.payload import Bytes, bytes_of, checksum, copy_of, view_of
from seqpar.servers.protocol import DtypeName, Task
from seqpar.servers.request import Request
from seqpar.softmax.partial import SoftmaxOptions

_NAMES: dict[torch.dtype, DtypeName] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Packed:
    """A request, ready to be sent to any server, any number of times.

    Attributes:
        header: of generation and number 0.
        parts: the payload: views of the request's tensors, which must not change meanwhile.
        results: what its result has.
    """

    header: Task
    parts: list[Bytes]
    results: list[Part]

    def numbered(
        self,
        generation: int,
        number: int,
        place: int | None = None,
        result_place: int | None = None,
    ) -> Task:
        """Return the header of an attempt."""
        return msgspec.structs.replace(
            self.header,
            generation=generation,
            request=number,
            place=place,
            result_place=result_place,
        )

    @property
    def room(self) -> int:
        """How many bytes the payload takes in an arena."""
        return placed(request_parts(self.header))[1]

    @property
    def result_room(self) -> int:
        """How many bytes the result takes in an arena."""
        return placed(self.results)[1]


def pack(request: Request) -> Packed:
    """Return a request ready to be sent; a RequestError says what no server would take."""
    q, k, v, options = request.q, request.k, request.v, request.options
    parts = [bytes_of(x) for x in request.tensors()]
    header = Task(
        generation=0,
        request=0,
        op=request.operation,
        dtype=_NAMES[q.dtype],
        batch=q.shape[0],
        q_rows=q.shape[1],
        k_rows=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        slices=len(request.slices),
        scale=options.scale,
        softcap=options.softcap,
        deterministic=options.deterministic,
        exact_out=request.exact_out,
        has_dlse=request.output is not None and request.output.dlse is not None,
        checksum=checksum(parts),
    )
    check_header(header, Limits(tokens=2**40, bytes=2**40))
    return Packed(header, parts, result_parts(header))


def unpack(task: Task, buffers: Sequence[Any], backend: str) -> Request:
    """Return the request that a header, checked already, and its payload are.

    Its tables are copies, since a peer may go on writing where they arrived; q, k and v and the
    like are views. A RequestError names what is wrong.
    """
    parts = request_parts(task)
    check_sizes(parts, [len(buffer) for buffer in buffers])
    if checksum(buffers) != task.checksum:
        raise RequestError("payload: its checksum is wrong")
    tensors = [
        (copy_of if i < 3 else view_of)(part, data)
        for i, (part, data) in enumerate(zip(parts, buffers, strict=True))
    ]
    table, q_positions, k_positions = (x.numpy() for x in tensors[:3])
    check_tables(table, q_positions, k_positions)
    options = SoftmaxOptions(task.scale, task.softcap, backend, task.deterministic)
    return Request.of_tensors(tensors, options, task.op == "backward", task.exact_out)


def unpack_result(parts: Sequence[Part], buffers: Sequence[Any], expected: int) -> list[Tensor]:
    """Return the tensors of a result, copies of what arrived, or raise a RequestError."""
    check_sizes(parts, [len(buffer) for buffer in buffers])
    found = [copy_of(part, data) for part, data in zip(parts, buffers, strict=True)]
    if checksum([bytes_of(x) for x in found]) != expected:
        raise RequestError("result: its checksum is wrong")
    return found
