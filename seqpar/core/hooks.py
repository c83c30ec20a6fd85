"""Hooks with which traces and measurements observe attention calls, or replace parts of them.

The exchange and the primitives read `hooks`, and `seqpar.tracing` sets it. It holds for the whole
process, since autograd runs backward in its own threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from seqpar.core.device_tables import rehearsing

T = TypeVar("T")
Moment = float | torch.cuda.Event  # seconds, or an event whose seconds are read later


def moment(device: torch.device) -> Moment:
    """Return the present: on CUDA an event in the device's current stream, otherwise seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class TracedWork(Protocol):
    """The work of one computation; each kind of attention has its own class in `attend.py`."""

    @property
    def area(self) -> int:
        """The number of (query, key) pairs that the mask allows, times query heads."""


class Recorder(Protocol):
    """The methods of a trace that attention calls report to."""

    def begin(self, label: str, rank: int) -> None:
        """Record that a strategy begins a pass, such as "ring backward", on this rank."""

    def compute(self, start: Moment, stop: Moment, work: TracedWork) -> None:
        """Record a computation."""

    def exchange(
        self,
        label: str,
        step: int,
        rank: int,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
    ) -> Callable[[], AbstractContextManager[None]]:
        """Record posted messages; return a function that makes the context of waiting for them."""


class Hooks:
    """Functions that observe or replace communication and computation.

    Attributes:
        trace: records computations and exchanges, unless it is None.
        skip_messages: whether exchanges send nothing. Received tensors are then arbitrary.
        replace_compute: called with the area of each computation, instead of the computation;
            results are then arbitrary. None: computations run.
        beside: called with a function that should overlap a rank's computation; it returns a
            function that waits for the end. None: a thread or a stream runs the function.
    """

    def __init__(self) -> None:
        self.trace: Recorder | None = None
        self.skip_messages = False
        self.replace_compute: Callable[[int], None] | None = None
        self.beside: Callable[[Callable[[], None]], Callable[[], None]] | None = None

    @contextmanager
    def set(self, **values: object) -> Iterator[None]:
        """Set some of the attributes within the context."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def computing(
        self, device: torch.device, work: Callable[[], TracedWork]
    ) -> AbstractContextManager[bool]:
        """Return the context of a computation; its value is False if `replace_compute` ran instead.

        `work()` returns the computation's work; it is called only if a hook is set.
        """
        if (self.trace is None and self.replace_compute is None) or rehearsing():
            return _COMPUTES
        return self._observed(device, work)

    @contextmanager
    def _observed(self, device: torch.device, work: Callable[[], TracedWork]) -> Iterator[bool]:
        start, replace = moment(device), self.replace_compute
        if replace is not None:
            replace(work().area)
        yield replace is None
        if self.trace is not None:
            self.trace.compute(start, moment(device), work())

    @staticmethod
    def computes_between(
        trace: Recorder, blocks: Iterable[T], works: Sequence[TracedWork], device: torch.device
    ) -> Iterator[T]:
        """Yield blocks, and trace what the caller computes after each, as that block's work."""
        remaining = iter(works)
        for block in blocks:
            start = moment(device)
            yield block
            del block  # frees it before the next one arrives
            trace.compute(start, moment(device), next(remaining))


_COMPUTES = nullcontext(True)
hooks = Hooks()
