"""Messages that are under way, and how they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from seqpar.comm.messages.header import Message

WaitContext = Callable[[], AbstractContextManager[None]]


class Pending:
    """Messages that are under way. Their tensors must not be touched before `wait` returns."""

    def __init__(
        self,
        works: list[dist.Work],
        messages: list[list[Message]],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Keep what is under way; `check()` raises if it is not what this rank expects."""
        self._works, self._messages, self._check = works, messages, check
        self.contexts: list[WaitContext] = []  # entered to wait: they name blame, and trace

    def wait(self) -> None:
        """Return when all messages have arrived, and those sent may be overwritten."""
        if self.contexts:
            with self.contexts.pop(0)():
                self.wait()
            return
        if self._check is not None:
            self._check()
        for work in self._works:
            work.wait()
        # Drop the tensors, so that each is freed when its owner drops it.
        self._works, self._messages, self._check = [], [], None


class Arriving:
    """Tensors into which messages that are under way are received."""

    def __init__(self, tensors: list[Tensor], pending: Pending) -> None:
        """Keep the tensors until they have arrived."""
        self._tensors, self._pending = tensors, pending

    def wait(self) -> list[Tensor]:
        """Wait for them, and return them; whoever takes them alone decides when they are freed."""
        self._pending.wait()
        arrived, self._tensors = self._tensors, []
        return arrived
