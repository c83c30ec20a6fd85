"""ATen's switch for kernels that give the same bits each time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ON = 2  # torch's debug mode "error": with "warn", FlashAttention-2's backward only warns


class _Switch:
    """The switch, on while any thread is within the context, then again as it was before.

    It is one for all threads. What another thread sets meanwhile stays. The debug mode is set since
    `torch.use_deterministic_algorithms` sets a flag of inductor as well, whatever that was before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._before = torch.get_deterministic_debug_mode()
                if self._before != _ON:
                    torch.set_deterministic_debug_mode(_ON)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                still_on = torch.get_deterministic_debug_mode() == _ON
                if not self._users and self._before != _ON and still_on:
                    torch.set_deterministic_debug_mode(self._before)


deterministic_kernels = _Switch().on
