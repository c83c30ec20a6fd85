"""Memory that the messages of one pass use, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MessageBuffers:
    """Buffers that the messages of a pass use in turn: message i has buffer i mod `count`.

    On a GPU, a new tensor per message would take more memory than the messages in use: torch does
    not reuse the memory of a tensor that the host has freed until the device has reached the same
    point, and the host runs many messages ahead of the device.

    A buffer may be used again when the exchange of its message has been waited for, and when all
    operators that read the message have been called. Its next message is then written after these
    operators have read it. NCCL receives a message only after the work that the current stream was
    given before the exchange was posted. With gloo on CPUs, waiting returns when an exchange has
    ended, and an operator returns when it has ended. So `count` must be larger by 1 than the number
    of messages that may be in use when another one is taken.

    A pass makes its own buffers, and a buffer is freed with its last message.
    """

    def __init__(
        self,
        count: int,
        sizes: Sequence[int],
        grow: bool = False,
        unit: torch.dtype | None = None,
    ) -> None:
        """Prepare buffers; `sizes` are the elements of each message, in the order of `take`.

        A buffer is as large as the largest of its messages. With `grow`, it is only as large as the
        largest message so far, and a larger message replaces it by a new buffer. If messages have
        different dtypes, `sizes` count elements of the dtype `unit`.
        """
        count = min(count, len(sizes))
        self._largest = [0 if grow else max(sizes[slot::count]) for slot in range(count)]
        self._blocks: list[Tensor | None] = [None] * count
        self._messages, self._taken, self._unit = len(sizes), 0, unit

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory (elements,) for the next message."""
        number, count = self._taken, len(self._blocks)
        self._taken += 1
        slot = number % count
        buffer = self._blocks[slot]
        if buffer is not None and buffer.dtype != dtype:
            buffer = buffer[: buffer.nbytes // dtype.itemsize * dtype.itemsize // buffer.itemsize]
            buffer = buffer.view(dtype)
        if buffer is None or len(buffer) < elements:
            size = self._largest[slot]
            if self._unit is not None:
                size = -(-size * self._unit.itemsize // dtype.itemsize)
            size = max(elements, size)
            self._blocks[slot] = buffer = None  # freed before the new one is allocated
            buffer = torch.empty(size, dtype=dtype, device=device)
        self._blocks[slot] = buffer if number + count < self._messages else None
        return buffer[:elements]
