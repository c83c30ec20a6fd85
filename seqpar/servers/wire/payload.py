"""Converts tensors to bytes and back, and computes their checksum.

Tensors of tasks move between a GPU and the host through pinned memory. A copy from or to other
memory would go through a buffer of the driver, and the host would wait for each one.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from seqpar.servers.wire.arena import placed

Bytes = NDArray[np.uint8]
Frame = bytes | memoryview  # of a message, as it has arrived
Buffer = Frame | Bytes  # a part of a payload, as it is sent or has arrived
with warnings.catch_warnings():  # torch warns once that such bytes are read-only
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

_CHECKSUM_MASK = 2**62 - 1  # the largest `Count` of a message


class RequestError(ValueError):
    """A request is malformed or above a cap."""


class PayloadTensor(NamedTuple):
    """The name, dtype and shape of one tensor of a payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Payload:
    """The layout of a request's or a result's tensors, each of which travels as one buffer."""

    def __init__(self, parts: Sequence[PayloadTensor]) -> None:
        self.parts = parts
        self.sizes = [math.prod(part.shape) * part.dtype.itemsize for part in parts]
        self.room = placed(self.sizes)[1]  # bytes that all of them take in an arena

    def check(self, buffers: Sequence[Buffer], expected: int) -> None:
        """Raise a RequestError unless the buffers have the right sizes and this checksum."""
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
        """Return the tensors from number `first` on, as views of the buffers."""
        return [
            torch.frombuffer(buffer, dtype=part.dtype).view(part.shape)
            if len(buffer)
            else torch.empty(part.shape, dtype=part.dtype)
            for part, buffer in zip(self.parts[first:], buffers[first:], strict=True)
        ]

    def whole(self, buffers: list[Buffer]) -> Sequence[Buffer]:
        """Return one buffer per tensor; buffers that arrived in pieces are copied."""
        return buffers if [len(x) for x in buffers] == self.sizes else self.copies(buffers)

    def copies(self, buffers: list[Buffer], pinned: bool = False) -> list[Bytes]:
        """Copy the buffers, or pieces of buffers, to aligned memory; return one array per tensor.

        Empties the list, so each buffer is freed as soon as it has been copied. Raises a
        RequestError if the sizes are wrong.
        """
        pieces = self._pieces(buffers)
        copies = [host_memory([size], torch.uint8, pinned).numpy() for size in self.sizes]
        buffers.clear()
        for copy, left in zip(copies, pieces, strict=True):
            start = 0
            while left:
                piece = np.frombuffer(left.popleft(), np.uint8)
                copy[start : start + piece.size] = piece
                start += piece.size
        return copies

    def _pieces(self, buffers: Sequence[Buffer]) -> list[deque[Buffer]]:
        """Assign the buffers to the tensors; raise a RequestError if one spans two tensors."""
        if sum(map(len, buffers)) != sum(self.sizes):
            self.check_sizes(buffers)
        left = deque(x for x in buffers if len(x))
        pieces: list[deque[Buffer]] = [deque() for _ in self.parts]
        for part, size, own in zip(self.parts, self.sizes, pieces, strict=True):
            missing = size
            while missing > 0:
                own.append(left.popleft())
                missing -= len(own[-1])
            if missing:
                raise RequestError(f"{part.name} must have {size} bytes, got {size - missing}")
        return pieces


def bytes_of(tensors: Sequence[Tensor]) -> list[Bytes]:
    """Return the bytes of each tensor, without a copy if it is contiguous on the CPU.

    The host waits once for the copies of all tensors of a GPU.
    """
    tensors = [x.detach() for x in tensors]
    on_host = [_begin_copy(x) if x.is_cuda else x.to("cpu").contiguous() for x in tensors]
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    # A tensor made from an empty NumPy array has strides of 0, and cannot be viewed as bytes.
    flat = (x.view(-1) if x.numel() else x.new_empty(0) for x in on_host)
    return [x.view(torch.uint8).numpy() for x in flat]


def _begin_copy(x: Tensor) -> Tensor:
    return host_memory(x.shape, x.dtype, pinned=True).copy_(x, non_blocking=True)


def host_memory(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Return an uninitialised CPU tensor, pinned if `pinned` and if pinned memory is available."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    return torch.empty(shape, dtype=dtype, device="cpu")


def on_device(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return the tensors on a device; the host waits once for copies to a GPU, if there are any."""
    if device.type != "cuda":
        return tuple(x.to(device) for x in tensors)
    copies = tuple(x.to(device, non_blocking=True) for x in tensors)
    if any(x.device != device for x in tensors):
        torch.cuda.current_stream(device).synchronize()
    return copies


def view_of(buffer: Buffer) -> memoryview:
    return memoryview(buffer)  # type: ignore[arg-type]  # NumPy's types do not list this


def checksum(parts: Sequence[Buffer], before: int = 0) -> int:
    """Return the 62-bit XXH3 checksum of a payload whose first parts have the checksum `before`.

    The checksum of one part is the seed of the next, so the parts' order and lengths matter. Other
    threads run meanwhile. It detects accidents; only keys protect from forgery.
    """
    result = before
    for part in parts:
        view = view_of(part)
        result = xxh3_64_intdigest(view.cast("B"), seed=result)
        result = (result ^ view.nbytes) & _CHECKSUM_MASK
    return result
