"""Memory that the messages of one forward or backward use, one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class MessageBuffers:
    """A few buffers that the messages of one forward or backward use in turn.

    Message i uses buffer i mod `count`. Without buffers, each message would be a new tensor. On a
    GPU, this would take more memory than the messages that are in use: the host runs many messages
    ahead of the GPU, and torch reuses a freed tensor's memory only when the GPU has reached the
    point at which the host freed the tensor.

    A buffer may be used again when two things have happened: the host has waited for the exchange
    of its message, and it has called all operators that read the message. The next message is then
    written after these operators have read the buffer. On NCCL this holds because NCCL receives a
    message only after the work that was queued on the current stream before the exchange was
    posted. With gloo on CPUs it holds because waiting returns when the exchange has ended, and an
    operator returns when it has ended.

    `count` must therefore be one more than the largest number of messages in use when `take` is
    called. A buffer is freed with its last message.
    """

    def __init__(
        self,
        count: int,
        sizes: Sequence[int],
        grow: bool = False,
        unit: torch.dtype | None = None,
    ) -> None:
        """Prepare the buffers. Memory is allocated in `take`.

        Args:
            count: the number of buffers.
            sizes: the number of elements of each message, in the order of the calls of `take`.
            grow: with False, a buffer is as large as the largest of its messages. With True, it is
                as large as the largest message so far, and is replaced by a new buffer for a larger
                message.
            unit: the dtype whose elements `sizes` count, if messages have different dtypes.
        """
        self._count = count = min(count, len(sizes))
        self._largest = [0 if grow else max(sizes[slot::count]) for slot in range(count)]
        self._blocks: list[Tensor | None] = [None] * count
        self._messages, self._taken, self._unit = len(sizes), 0, unit

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        slot, elements = self._taken % self._count, math.prod(shape)
        buffer = self._blocks[slot]
        if buffer is None or buffer.dtype != dtype or buffer.numel() < elements:
            del buffer  # it may be freed before other memory is allocated
            buffer = self._other(slot, elements, dtype, device)
        self._taken += 1
        if self._taken + self._count > self._messages:  # no further message uses this buffer
            self._blocks[slot] = None
        return buffer[:elements].view(shape)

    def _other(self, slot: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self._blocks[slot]
        if buffer is not None:
            buffer = buffer[: buffer.nbytes // dtype.itemsize * dtype.itemsize // buffer.itemsize]
            buffer = buffer.view(dtype)
        if buffer is None or buffer.numel() < elements:
            size = self._largest[slot]
            if self._unit is not None:
                size = -(-size * self._unit.itemsize // dtype.itemsize)
            size = max(elements, size)
            # Frees the old buffer before the new one is allocated.
            self._blocks[slot] = buffer = None
            buffer = torch.empty(size, dtype=dtype, device=device)
        self._blocks[slot] = buffer
        return buffer
