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

_BLOCK = 2**18  # bytes of a payload up to which to copy it takes less time than more parts
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
    """The tensors of a request or a result, and the buffers in which they travel.

    A small payload is one buffer, in which its parts lie as in an arena; of a large one each part
    is a buffer.

    Attributes:
        parts: the tensors, in order.
        room: how many bytes they take in an arena.
        sizes: how many bytes each buffer has.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Lay out these tensors."""
        self.parts = parts
        sizes = [part.nbytes for part in parts]
        places, self.room = placed(sizes)
        self._is_block = self.room <= _BLOCK
        self.sizes = [self.room] if self._is_block else sizes
        # in which buffer each part is, and where
        self._where = [(0, x) if self._is_block else (i, 0) for i, x in enumerate(places)]

    def pack(self, tensors: Sequence[Tensor]) -> list[Bytes]:
        """Return the buffers of these tensors; those of a large payload are views of them."""
        found = [bytes_of(x) for x in tensors]
        if not self._is_block:
            return found
        block, end = np.empty(self.room, np.uint8), 0
        for data, (_, start) in zip(found, self._where, strict=True):
            block[end:start] = 0
            end = start + data.size
            block[start:end] = data
        block[end:] = 0
        return [block]

    def check(self, buffers: Sequence[Any], expected: int) -> None:
        """Raise a RequestError unless buffers have the right sizes, and this checksum."""
        self.check_sizes(buffers)
        if checksum(buffers) != expected:
            raise RequestError("payload: its checksum is wrong")

    def check_sizes(self, buffers: Sequence[Any]) -> None:
        """Raise a RequestError unless buffers have the right sizes."""
        if len(buffers) != len(self.sizes):
            raise RequestError(f"payload must have {len(self.sizes)} parts, got {len(buffers)}")
        for i, (buffer, size) in enumerate(zip(buffers, self.sizes, strict=True)):
            if (found := len(buffer)) != size:
                name = "payload" if self._is_block else self.parts[i].name
                raise RequestError(f"{name} must have {size} bytes, got {found}")

    def bytes(self, buffers: Sequence[Any], i: int) -> bytes:
        """Return a copy of the bytes of part i."""
        buffer, start = self._where[i]
        return bytes(buffers[buffer][start : start + self.parts[i].nbytes])

    def tensors(self, buffers: Sequence[Any], first: int = 0) -> list[Tensor]:
        """Return the tensors from the one with this number on: views of the buffers.

        They may be aligned as no other tensor is.
        """
        found = []
        for part, (buffer, start) in list(zip(self.parts, self._where, strict=True))[first:]:
            if count := math.prod(part.shape):
                where = {"count": count, "offset": start}
                flat = torch.frombuffer(buffers[buffer], dtype=part.dtype, **where)
                found.append(flat.view(part.shape))
            else:
                found.append(torch.empty(part.shape, dtype=part.dtype))
        return found

    def copies(self, buffers: Sequence[Any]) -> list[Bytes]:
        """Return copies of buffers of the right sizes, aligned as tensors are."""
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


def checksum(parts: Sequence[Any]) -> int:
    """Return the checksum of a payload.

    It is the CRC-32 of small parts, and of large ones the CRC-32 of the sums, modulo 2⁶⁴, of every
    512th word (every 4,096th of what is larger than a cache), and of the bytes that remain. A
    flipped bit changes one sum by a power of two, which the CRC notices; it takes 22 GB/s on one
    core, where the CRC of all bytes takes 4. Against forgery there are keys.
    """
    result = 0
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
        result = zlib.crc32(data[whole:], result)
    return result
