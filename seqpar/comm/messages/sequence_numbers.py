"""Number the calls on a group, so that two ranks can tell whether they are in the same one.

A rank may make a call in which it and a peer need nothing of each other, and which the peer does
not make: a check of its own, a recomputation, a batch of which the peer holds no tokens. So two
ranks count only those calls in which they have messages for each other. They make these in the same
order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class CallNumbers:
    """The numbers of one call, which it has between this rank and each peer.

    Attributes:
        own: how many calls this rank had made, with it; 0 outside calls.
    """

    def __init__(self, calls: list[int], rank: int, numbers: Tensor | None = None) -> None:
        """Number a new call, or one whose numbers are known: what `as_tensor` returned.

        `calls` counts those of this rank, at `rank`, and of it and each peer; it is changed.
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
        """Return the call's number between this rank and a peer, as the first message needs it."""
        if not self.own:
            return 0
        if not self._numbers[peer]:
            self._calls[peer] += 1
            self._numbers[peer] = self._calls[peer]
        return self._numbers[peer]

    def as_tensor(self) -> Tensor:
        """Return the numbers, (ranks,) on the CPU: the bits of a float64 tensor.

        A forward returns them for its backward, with its other results. As floats, counts are
        below 1e-300: so the results of two equal calls are equal within every tolerance, which
        `torch.library.opcheck` tests, although each call has its own numbers.
        """
        # Integers would differ between two equal calls, and so would the shape of an empty tensor.
        # A table in Python could not tell apart two calls whose backwards run in any order.
        # As a result of the operator, the tensor outlives copies by hooks, selective checkpoints
        # keep it, and compiled graphs need nothing new.
        # torch.tensor takes four times as long
        return torch.from_numpy(np.array(self._numbers, dtype=np.int64).view(np.float64))


def empty_numbers(ranks: int) -> Tensor:
    """Return an empty tensor like those of `as_tensor`, with which torch.compile traces."""
    return torch.empty(ranks, dtype=torch.float64, device="cpu")


OUTSIDE = CallNumbers([0], 0, torch.zeros(1, dtype=torch.int64, device="cpu"))
