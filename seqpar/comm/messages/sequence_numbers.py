"""Number the calls on a group, so that two ranks can detect that they are in different calls.

A rank may make a call that exchanges no messages with a peer, and that the peer does not make: a
local check, a recomputation, a batch without tokens on the peer. Two ranks therefore count only
calls in which they exchange messages. They make these calls in the same order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class CallNumbers:
    """The numbers of one call, one between this rank and each peer.

    Attributes:
        own: the number of calls that this rank has made, including this one; 0 outside calls.
    """

    def __init__(self, calls: list[int], rank: int, numbers: Tensor | None = None) -> None:
        """Number a new call, or use the `numbers` that `as_tensor` returned.

        `calls` counts this rank's calls, at `rank`, and its calls with each peer. A new call
        changes `calls`.
        """
        self._calls = calls
        if numbers is None:
            calls[rank] += 1
            self._numbers = [0] * len(calls)
            self._numbers[rank] = calls[rank]
        else:
            self._numbers = numbers.view(torch.int64).tolist()
        self.own = self._numbers[rank]

    def between(self, peer: int) -> int:
        """Return the call's number between this rank and a peer, from their first message on."""
        if not self.own:
            return 0
        if not self._numbers[peer]:
            self._calls[peer] += 1
            self._numbers[peer] = self._calls[peer]
        return self._numbers[peer]

    def as_tensor(self) -> Tensor:
        """Return the numbers, (ranks,) on the CPU: the bits of a float64 tensor.

        A forward returns them to its backward. As floats, the numbers are below 1e-300. Results of
        two equal calls are therefore equal within every tolerance, as `torch.library.opcheck`
        requires, although each call has its own numbers.
        """
        # Integers would differ between two equal calls, and so would the shape of an empty tensor.
        # A table in Python could not tell apart two calls whose backwards run in any order.
        # As a result of the operator, the tensor outlives copies by hooks, selective checkpoints
        # keep it, and compiled graphs need nothing new.
        # torch.tensor would take four times as long.
        return torch.from_numpy(np.array(self._numbers, dtype=np.int64).view(np.float64))


def empty_numbers(ranks: int) -> Tensor:
    """Return an uninitialized tensor shaped as by `as_tensor`, for tracing by torch.compile."""
    return torch.empty(ranks, dtype=torch.float64, device="cpu")


OUTSIDE = CallNumbers([0], 0, torch.zeros(1, dtype=torch.int64, device="cpu"))
