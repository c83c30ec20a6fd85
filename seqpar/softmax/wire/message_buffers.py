"""Memory that the messages of one pass use, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MessageBuffers:
    """Buffers that messages of one dtype use in turn: message i has buffer i mod `count`.

    A new tensor per message takes more memory than its bytes on a GPU: torch keeps the memory of a
    message until the device has come as far as the host, which runs ahead by many messages.

    A buffer may be used again when the exchange of its message has been waited for, and when all
    operators that read the message have been called. What is written next then follows them: NCCL
    receives after what the current stream was given before the post, and gloo's wait and a CPU's
    operators return when they have ended. So `count` must be larger by 1 than the number of
    messages that may be in use when another one is taken.

    A pass makes its own buffers, and a buffer is freed with its last message.
    """

    def __init__(self, count: int, sizes: Sequence[int], grow: bool = False) -> None:
        """Prepare buffers; `sizes` are the elements of each message, in the order of `take`.

        A buffer is as large as the largest of its messages. With `grow` it is as large as the
        largest so far, and a larger message gets a new one.
        """
        count = min(count, len(sizes))
        self._largest = [0 if grow else max(sizes[slot::count]) for slot in range(count)]
        self._buffers: list[Tensor | None] = [None] * count
        self._messages, self._taken = len(sizes), 0

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory (elements,) for the next message."""
        number, count = self._taken, len(self._buffers)
        self._taken += 1
        slot = number % count
        buffer = self._buffers[slot]
        if buffer is None or len(buffer) < elements:
            size = max(elements, self._largest[slot])
            self._buffers[slot] = buffer = None  # freed before the new one is allocated
            buffer = torch.empty(size, dtype=dtype, device=device)
        self._buffers[slot] = buffer if number + count < self._messages else None
        return buffer[:elements]
