"""The indices of some spans' states among all states of a call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints


class Places(NamedTuple):
    """The spans, of some, that have a state, and its index among the call's states."""

    spans: Tensor
    states: Tensor

    @classmethod
    def of(cls, states: Ints, device: torch.device) -> Places:
        """Return it for `state_in` or `state_out` of these spans."""
        spans = np.flatnonzero(states >= 0)
        return cls(*(torch.from_numpy(x).to(device) for x in (spans, states[spans])))

    def __bool__(self) -> bool:
        """Return whether any of the spans has a state, without waiting for the device."""
        return self.spans.numel() > 0

    def fill(self, spans: Tensor, states: Tensor | None) -> Tensor:
        """Set the spans' states, in `spans` (spans, …) of zeros, and return it."""
        if states is not None:
            found = states.index_select(0, self.states)
            spans.index_copy_(0, self.spans, found.view(len(found), *spans.shape[1:]))
        return spans

    def put(self, states: Tensor, spans: Tensor) -> None:
        """Set the call's `states` to those that leave the spans."""
        found = spans.index_select(0, self.spans)
        states.index_copy_(0, self.states, found.view(len(found), *states.shape[1:]))
