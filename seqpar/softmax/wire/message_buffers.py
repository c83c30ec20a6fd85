"""Buffers that several messages of one forward or backward use, one message after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class MessageBuffers:
    """Buffers that several messages of one forward or backward use, one message after another.

    Message i uses buffer i mod `count`. The caller must choose `count` so that, when `take` is
    called, at most `count` − 1 earlier messages are still in use. A message is in use until the
    host has waited for the exchange of the message and has called all operators that read the
    message.

    With a new tensor for each message, a GPU would need more memory. The host queues many messages
    before the GPU sends them, and torch reuses the memory of a freed tensor only when the GPU has
    finished the work that was queued before the tensor was freed. A message does not overwrite data
    that queued operators still read: NCCL starts to receive it only when the GPU has finished the
    work that was queued before the exchange was posted.
    """

    def __init__(
        self,
        count: int,
        sizes: Sequence[int],
        grow: bool = False,
        unit: torch.dtype | None = None,
    ) -> None:
        """Prepare the buffers. Their memory is allocated when `take` is called.

        Args:
            count: the number of buffers.
            sizes: the number of elements of each message, in the order of the calls of `take`.
            grow: whether buffers may grow. With False, a buffer has the size of the largest message
                that will use the buffer. With True, a buffer has the size of the largest message
                that has used the buffer so far. For a larger message, a new buffer is allocated.
            unit: the dtype of the elements in `sizes`. It is needed if messages have different
                dtypes.
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
