"""Hooks with which traces and measurements observe attention calls, or replace parts of them.

The exchange and the primitives consult `hooks`; `seqpar.tracing` sets it. It holds for the process,
not for a thread, since autograd runs backward in threads of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Moment = float | torch.cuda.Event  # seconds, or a point in a CUDA stream that becomes seconds later


def moment(device: torch.device) -> Moment:
    """Return the present: on CUDA an event in the device's current stream, else seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class TracedWork(Protocol):
    """What is computed; both kinds of attention say more of it (`attend.py`)."""

    @property
    def area(self) -> int:
        """How many (query, key) pairs that see each other, times query heads."""


class Recorder(Protocol):
    """The methods of a trace that attention calls report to."""

    def begin(self, label: str, rank: int) -> None:
        """Record that a strategy begins a pass, as in "ring backward", on this rank."""

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
        """Record that messages are posted; return what makes the context to wait for them in."""


class Hooks:
    """What is done besides, or instead of, communication and computation.

    Attributes:
        trace: what records computations and exchanges; None: nothing does.
        skip_messages: whether exchanges send nothing. What should have arrived is then arbitrary.
        replace_compute: called with the area of each computation, in its place; results are then
            arbitrary. None: computations run.
        beside: called with what is to run beside a rank's computation, in the place of a thread or
            a stream; it returns what waits for its end. None: that runs beside it.
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
        """Return the context of a computation, which gives False if `replace_compute` replaced it.

        `work()` says what is computed.
        """
        if self.trace is None and self.replace_compute is None:
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

    def compute(
        self, work: Callable[[], TracedWork], device: torch.device, function: Callable[[], T]
    ) -> T | None:
        """Return `function()`, or None if `replace_compute` replaced it; see `computing`."""
        with self.computing(device, work) as computes:
            return function() if computes else None

    @staticmethod
    def computes_between(
        trace: Recorder, blocks: Iterable[T], works: Sequence[TracedWork], device: torch.device
    ) -> Iterator[T]:
        """Yield the blocks, and trace what the caller computes with each before the next.

        `works` has the work of each.
        """
        remaining = iter(works)
        for block in blocks:
            start = moment(device)
            yield block
            del block  # so that it can be freed before the next one arrives
            trace.compute(start, moment(device), next(remaining))


_COMPUTES = nullcontext(True)
hooks = Hooks()
