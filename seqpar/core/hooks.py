"""Hooks with which traces and measurements observe attention calls, or replace parts of them.

Exchanges and computations read `hooks()`. `seqpar.tracing` and simulations set hooks. Hooks apply
to the calls of the thread that sets them, and in the threads of autograd and of seqpar that work
for these calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from seqpar.core.device_tables import rehearsing
from seqpar.core.torch_private import inherited, set_inherited

T = TypeVar("T")
Moment = float | torch.cuda.Event  # seconds, or an event whose seconds are read later


def moment(device: torch.device) -> Moment:
    """Return the current time: on a GPU as an event in the current stream, and on a CPU in
    seconds.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class TracedWork(Protocol):
    """The work of one computation of attention."""

    @property
    def area(self) -> int:
        """The number of (query, key) pairs that the mask allows, times the number of query
        heads.
        """


class Recorder(Protocol):
    """The methods of a trace with which attention calls report what they do."""

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
        """Record posted messages. Return a function that makes the context in which the rank waits
        for these messages.
        """


@dataclass(frozen=True)
class Hooks:
    """Functions that observe or replace communication and computation.

    Attributes:
        traces: the traces that are active. The last trace in the list records computations and
            exchanges.
        skip_messages: whether exchanges send nothing, so that received tensors have arbitrary
            values.
        replace_compute: a function that is called in place of each computation. Its argument is the
            number of (query, key) pairs times the number of heads. Results have arbitrary values.
            With None, computations run.
        dry_run: a function that returns a context. In this context, computations that
            `replace_compute` replaces run on tensors of the meta device, so that their memory can
            be counted. With None, replaced computations do not run.
        beside: a function that starts work that should overlap a rank's computation, and returns a
            function that waits for the end of this work. With None, the work runs in a thread or a
            stream.
        replays: whether recorded passes may be replayed (`softmax/replay.py`). If any other hook is
            set, no pass is replayed.
    """

    traces: tuple[Recorder, ...] = ()
    skip_messages: bool = False
    replace_compute: Callable[[int], None] | None = None
    dry_run: Callable[[], AbstractContextManager[None]] | None = None
    beside: Callable[[Callable[[], None]], Callable[[], None]] | None = None
    replays: bool = True

    @property
    def trace(self) -> Recorder | None:
        return self.traces[-1] if self.traces else None

    @property
    def observe_computations(self) -> bool:
        return bool(self.traces or self.replace_compute)

    def computing(
        self, device: torch.device, work: Callable[[], TracedWork]
    ) -> AbstractContextManager[bool]:
        """Return the context in which a computation runs. If a hook replaces the computation, the
        value of the context is False, and the caller must not compute.

        `work()` returns the work of the computation, and is called only if a hook is set.
        """
        if not self.observe_computations or rehearsing():
            return _COMPUTES
        return self._observed(device, work)

    @contextmanager
    def _observed(self, device: torch.device, work: Callable[[], TracedWork]) -> Iterator[bool]:
        start, instead = moment(device), self.replace_compute
        if instead is not None:
            instead(work().area)
        with nullcontext() if self.dry_run is None else self.dry_run():
            yield instead is None or self.dry_run is not None
        if self.trace is not None:
            self.trace.compute(start, moment(device), work())

    @staticmethod
    def computes_between(
        trace: Recorder, blocks: Iterable[T], works: Sequence[TracedWork], device: torch.device
    ) -> Iterator[T]:
        """Yield `blocks`. The trace records what the caller computes after each block as the work
        of this block.
        """
        remaining = iter(works)
        for block in blocks:
            start = moment(device)
            yield block
            del block  # freed before the next block arrives
            trace.compute(start, moment(device), next(remaining))


_COMPUTES = nullcontext(True)
_KEY, _NONE = "seqpar hooks", Hooks()
# Whether a thread of this process has ever set hooks. Until then, `hooks` does not look up the
# thread's value. It is called several times for each exchange and each computation.
_were_set = False


def hooks() -> Hooks:
    """Return the hooks of this thread's calls."""
    return inherited(_KEY, _NONE) if _were_set else _NONE


def put_hooks(**values: Any) -> None:
    """Set some of this thread's hooks."""
    global _were_set
    _were_set = True
    set_inherited(_KEY, replace(hooks(), **values))


@contextmanager
def set_hooks(**values: Any) -> Iterator[None]:
    """Set some of this thread's hooks within the context."""
    before = {name: getattr(hooks(), name) for name in values}
    put_hooks(**values)
    try:
        yield
    finally:
        put_hooks(**before)


def with_hooks(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that other threads call, and that runs `function` with this thread's
    hooks.
    """
    observed = hooks()

    def run() -> T:
        before = hooks()
        set_inherited(_KEY, observed)
        try:
            return function()
        finally:
            set_inherited(_KEY, before)

    return run
