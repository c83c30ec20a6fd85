"""Posted messages, and objects to wait for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from seqpar.comm.messages.header import Message

WaitContext = Callable[[], AbstractContextManager[None]]


class Pending:
    """Posted messages. Their tensors must not be read or written before `wait` returns."""

    def __init__(
        self,
        works: list[dist.Work],
        messages: list[list[Message]],
        check: Callable[[], None] | None = None,
        error_of: Callable[[Exception], Exception] | None = None,
    ) -> None:
        """`check()` raises if a peer's messages are not what this rank expects.

        `error_of` returns the error to raise in place of a backend's.
        """
        self._works, self._messages, self._check = works, messages, check
        self._error_of = error_of
        self.contexts: list[
            WaitContext
        ] = []  # entered around waiting, to name the rank at fault and to trace

    def wait(self) -> None:
        """Return when received tensors are complete and sent tensors may be overwritten."""
        if self.contexts:
            with self.contexts.pop(0)():
                self.wait()
            return
        if self._check is not None:
            self._check()
        try:
            for work in self._works:
                work.wait()
        except dist.DistBackendError as error:
            if self._error_of is None:
                raise
            raise self._error_of(error) from error
        # Drop the tensors, so that each is freed when its owner drops it.
        self._works, self._messages, self._check = [], [], None


class Arriving:
    """Tensors into which posted messages are received."""

    def __init__(self, tensors: list[Tensor], pending: Pending) -> None:
        self._tensors, self._pending = tensors, pending

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them. This object then keeps none of them alive."""
        self._pending.wait()
        arrived, self._tensors = self._tensors, []
        return arrived
