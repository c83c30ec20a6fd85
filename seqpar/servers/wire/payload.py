"""The conversion of tensors to bytes and back, and the checksum of the bytes.

A *payload* is the bytes of several tensors. Each tensor is a *part* of the payload, and is sent and
received as one buffer. A payload is sent in *chunks*. A chunk can be larger or smaller than a part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from seqpar.servers.wire.arena import placed
from seqpar.servers.wire.host_memory import host_memory

Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview | Bytes  # a part of a payload
# torch warns once per process about read-only buffers. This call triggers the warning where it is
# suppressed.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

CHUNK_BYTES = 2**21  # larger chunks were not faster over loopback


class RequestError(ValueError):
    """A request is malformed, or above a limit of the server."""


class PayloadTensor(NamedTuple):
    """The name, dtype and shape of one tensor of a payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Payload:
    """The tensors of a request or of a result, and their sizes in bytes."""

    def __init__(self, parts: Sequence[PayloadTensor]) -> None:
        self.parts = parts
        self.sizes = [math.prod(part.shape) * part.dtype.itemsize for part in parts]
        self.room = placed(self.sizes)[1]  # the bytes that all parts take in an arena

    def check(self, buffers: Sequence[Buffer], expected: int) -> None:
        """Raise a RequestError unless the buffers have the right sizes and checksum."""
        self.check_sizes(buffers)
        if checksum(buffers) != expected:
            raise RequestError("payload: its checksum is wrong")

    def check_sizes(self, buffers: Sequence[Buffer]) -> None:
        if len(buffers) != len(self.parts):
            raise RequestError(f"payload must have {len(self.parts)} parts, got {len(buffers)}")
        for part, size, buffer in zip(self.parts, self.sizes, buffers, strict=True):
            if len(buffer) != size:
                expected = f"{size} bytes for {part.shape} of {part.dtype}"
                raise RequestError(f"{part.name} must have {expected}, got {len(buffer)}")

    def tensors(self, buffers: Sequence[Buffer], first: int = 0) -> list[Tensor]:
        """Return the tensors of the payload, as views of the buffers. The first `first` tensors are
        left out.
        """
        return [
            torch.frombuffer(buffer, dtype=part.dtype).view(part.shape)
            if len(buffer)
            else torch.empty(part.shape, dtype=part.dtype)
            for part, buffer in zip(self.parts[first:], buffers[first:], strict=True)
        ]


class Incoming:
    """A payload that arrives in chunks. Each chunk is copied into the memory of the parts."""

    def __init__(self, payload: Payload, pinned: bool = False) -> None:
        self.parts = [host_memory([x], torch.uint8, pinned).numpy() for x in payload.sizes]
        self.missing = sum(payload.sizes)  # the number of bytes that have not arrived
        self._filling = iter(self.parts)
        self._left: Bytes = np.empty(0, np.uint8)  # the rest of the part that is being filled

    def take(self, data: Buffer) -> None:
        """Copy the next chunk into the parts. Raises a RequestError if the chunk has more bytes
        than the parts still need.
        """
        chunk: Bytes = np.frombuffer(data, np.uint8)
        if chunk.size > self.missing:
            raise RequestError(f"payload: {self.missing} bytes were missing, {chunk.size} came")
        self.missing -= chunk.size
        while chunk.size:
            while not self._left.size:
                self._left = next(self._filling)
            size = min(chunk.size, self._left.size)
            self._left[:size] = chunk[:size]
            self._left, chunk = self._left[size:], chunk[size:]


def chunks(parts: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Yield the bytes of all parts in order, in lists of views with at most 2 MiB per list."""
    chunk: list[Bytes] = []
    room = CHUNK_BYTES
    for part in parts:
        left = part
        while left.size:
            chunk.append(left[:room])
            room -= chunk[-1].size
            left = left[chunk[-1].size :]
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def bytes_of(tensors: Sequence[Tensor]) -> list[Bytes]:
    """Return the bytes of each tensor. A contiguous tensor on the CPU is not copied.

    The tensors of a GPU are copied together, and the host waits once for all copies.
    """
    tensors = [x.detach() for x in tensors]
    on_host = [_begin_copy(x) if x.is_cuda else x.to("cpu").contiguous() for x in tensors]
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    # torch cannot view a tensor that was made from an empty NumPy array as bytes, because its
    # strides are 0.
    flat = (x.view(-1) if x.numel() else x.new_empty(0) for x in on_host)
    return [x.view(torch.uint8).numpy() for x in flat]


def _begin_copy(x: Tensor) -> Tensor:
    return host_memory(x.shape, x.dtype, pinned=True).copy_(x, non_blocking=True)


def on_device(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return the tensors on a device. If tensors must be copied to a GPU, the host waits once."""
    if device.type != "cuda":
        return tuple(x.to(device) for x in tensors)
    copies = tuple(x.to(device, non_blocking=True) for x in tensors)
    if any(x.device != device for x in tensors):
        torch.cuda.current_stream(device).synchronize()
    return copies


def view_of(buffer: Buffer) -> memoryview:
    return memoryview(buffer)  # type: ignore[arg-type]  # NumPy's types do not list this


def checksum(parts: Sequence[Buffer], before: int = 0) -> int:
    """Return the 64-bit XXH3 checksum of a payload, which consists of parts. Each part is the bytes
    of one tensor. `before` is the checksum of earlier parts.

    The result depends on the order and lengths of the parts. The checksum detects accidental
    damage; only TLS protects from forgery.
    """
    result = before
    for part in parts:
        view = view_of(part)
        result = xxh3_64_intdigest(view.cast("B"), seed=result)
        result ^= view.nbytes
    return result
