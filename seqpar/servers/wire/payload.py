"""Payloads: tensors as bytes, and bytes as tensors; their checksum."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from seqpar.servers.wire.arena import placed

Bytes = NDArray[np.uint8]
Frame = bytes | memoryview  # of a message, as it has arrived
Buffer = Frame | Bytes  # a part of a payload, as it is sent or has arrived
with warnings.catch_warnings():  # torch says once that such bytes may not be written to
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

_CHECKSUM = 2**62 - 1  # the largest checksum that a message can hold


class RequestError(ValueError):
    """A request is malformed, or above a cap."""


@dataclass(frozen=True)
class PayloadTensor:
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

    def __init__(self, parts: Sequence[PayloadTensor]) -> None:
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

    def whole(self, buffers: list[Any]) -> Sequence[Any]:
        """Return one buffer for each part; where parts came in pieces, these are `copies`."""
        return buffers if [len(x) for x in buffers] == self.sizes else self.copies(buffers)

    def copies(self, buffers: list[Any]) -> list[Bytes]:
        """Return copies of all parts, aligned as any tensor is, each of one or several buffers.

        The list is emptied, so that each buffer is freed when it has been copied. A RequestError
        says that sizes are wrong.
        """
        pieces = self._pieces(buffers)
        found = [torch.empty(size, dtype=torch.uint8).numpy() for size in self.sizes]
        buffers.clear()
        for copy, left in zip(found, pieces, strict=True):
            start = 0
            while left:
                piece = np.frombuffer(left.popleft(), np.uint8)
                copy[start : start + piece.size] = piece
                start += piece.size
        return found

    def _pieces(self, buffers: Sequence[Any]) -> list[deque[Any]]:
        """Return the buffers of each part; a RequestError says that sizes are wrong."""
        if sum(map(len, buffers)) != sum(self.sizes):
            self.check_sizes(buffers)
        left = deque(x for x in buffers if len(x))
        pieces: list[deque[Any]] = [deque() for _ in self.parts]
        for part, size, own in zip(self.parts, self.sizes, pieces, strict=True):
            missing = size
            while missing > 0:
                own.append(left.popleft())
                missing -= len(own[-1])
            if missing:
                raise RequestError(f"{part.name} must have {size} bytes, got {size - missing}")
        return pieces


def bytes_of(x: Tensor) -> Bytes:
    """Return the bytes of a tensor: without a copy, if it is on the CPU and contiguous."""
    if not x.numel():
        return np.empty(0, np.uint8)
    x = x.detach() if x.requires_grad else x
    return x.to("cpu").contiguous().view(-1).view(torch.uint8).numpy()


def checksum(parts: Sequence[Any], before: int = 0) -> int:
    """Return the checksum of a payload, whose first parts have the checksum `before`.

    It is XXH3, of 62 bits, of all bytes of all parts. The checksum of one part is the seed of the
    next, so the order of the parts and their lengths matter. It lets other threads run, and finds
    accidents; only keys protect from forgery.
    """
    result = before
    for part in parts:
        result = xxh3_64_intdigest(memoryview(part).cast("B"), seed=result)
        result = (result ^ memoryview(part).nbytes) & _CHECKSUM
    return result
