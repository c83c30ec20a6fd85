"""Payloads: tensors as bytes, and bytes as tensors; their checksum."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.servers.arena import placed

Bytes = NDArray[np.uint8]
with warnings.catch_warnings():  # torch says once that such bytes may not be written to
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

# Bytes of a part from which on its checksum is not the CRC, but sums of some words, and of more.
_SUMMED, _SUMMED_WIDE = 2**13, 2**21


class RequestError(ValueError):
    """A request is malformed, or above a cap."""


@dataclass(frozen=True)
class Part:
    """One tensor of a payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Payload:
    """The tensors of a request or a result, each of which travels as a buffer of bytes.

    Attributes:
        parts: the tensors, in order.
        sizes: how many bytes each has.
        room: how many bytes they take in an arena.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Lay out these tensors."""
        self.parts = parts
        self.sizes = [part.nbytes for part in parts]
        self.room = placed(self.sizes)[1]

    def check(self, buffers: Sequence[Any], expected: int) -> None:
        """Raise a RequestError unless buffers have the right sizes, and this checksum."""
        self.check_sizes(buffers)
        if checksum(buffers) != expected:
            raise RequestError("payload: its checksum is wrong")

    def check_sizes(self, buffers: Sequence[Any]) -> None:
        """Raise a RequestError unless buffers have the right sizes."""
        if len(buffers) != len(self.parts):
            raise RequestError(f"payload must have {len(self.parts)} parts, got {len(buffers)}")
        for part, size, buffer in zip(self.parts, self.sizes, buffers, strict=True):
            if len(buffer) != size:
                expected = f"{size} bytes for {part.shape} of {part.dtype}"
                raise RequestError(f"{part.name} must have {expected}, got {len(buffer)}")

    def tensors(self, buffers: Sequence[Any], first: int = 0) -> list[Tensor]:
        """Return the tensors from this number on: views of buffers, aligned as those are."""
        return [
            torch.frombuffer(buffer, dtype=part.dtype).view(part.shape)
            if len(buffer)
            else torch.empty(part.shape, dtype=part.dtype)
            for part, buffer in zip(self.parts[first:], buffers[first:], strict=True)
        ]

    def copies(self, buffers: Sequence[Any]) -> list[Bytes]:
        """Return copies of buffers of the right sizes, aligned as any tensor is."""
        found = [torch.empty(size, dtype=torch.uint8).numpy() for size in self.sizes]
        for copy, buffer in zip(found, buffers, strict=True):
            copy[:] = np.frombuffer(buffer, np.uint8)
        return found


def bytes_of(x: Tensor) -> Bytes:
    """Return the bytes of a tensor: without a copy, if it is on the CPU and contiguous."""
    if not x.numel():
        return np.empty(0, np.uint8)
    x = x.detach() if x.requires_grad else x
    return x.to("cpu").contiguous().view(-1).view(torch.uint8).numpy()


def checksum(parts: Sequence[Any], before: int = 0) -> int:
    """Return the checksum of a payload, of whose first parts it is that `before`.

    It is the CRC-32 of small parts, and of large ones the CRC-32 of the sums, modulo 2⁶⁴, of every
    512th word (every 4,096th of what is larger than a cache), and of the bytes that remain. A
    flipped bit changes one sum by a power of two, which the CRC notices; it takes 22 GB/s on one
    core, where the CRC of all bytes takes 4. Against forgery there are keys.
    """
    result = before
    for part in parts:
        size = memoryview(part).nbytes
        if size < _SUMMED:
            result = zlib.crc32(part, result)
            continue
        columns = 4096 if size >= _SUMMED_WIDE else 512
        data = np.frombuffer(part, np.uint8)
        whole = size - size % (8 * columns)
        words = data[:whole].view(np.uint64).reshape(-1, columns)
        result = zlib.crc32(words.sum(0, dtype=np.uint64), result)
        result = zlib.crc32(data[whole:].data, result)
    return result
