"""The outcome of playing programs: the times at which ranks compute, send and wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from seqpar.costs.grid import Floats
from seqpar.simulate.recording.program import Program
from seqpar.tracing.exposure import Exposure
from seqpar.tracing.trace import Event, Trace

AS_FAST = "as fast"


class Outcome:
    """The times at which ranks computed, sent and waited, in seconds from the start of the step.

    Attributes:
        seconds: the time at which the last rank ended.
        ends: (ranks,) the time at which each rank ended.
        busy: (ranks,) seconds of computation.
        waiting: (ranks,) seconds of waiting for messages.
        sent_bytes: (ranks,) bytes sent.
        peak_bytes: (ranks,) the most bytes held at once by tensors that the step creates.
        stand_ins: (ranks,) for each rank, the rank that was simulated in its place. This is usually
            the rank itself.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        stand_ins: Sequence[int],
        events: dict[int, list[Event]],
        replay: Callable[[bool, bool], dict[int, list[Event]]],
    ) -> None:
        self._events, self._replay = events, replay
        self.stand_ins = np.array(stand_ins)
        places = {rank: place for place, rank in enumerate(programs)}
        played = [places[rank] for rank in stand_ins]
        self.ends = _ends(events)[played]
        self.seconds = float(self.ends.max())
        self.busy, self.waiting = (_spent(events, kind)[played] for kind in ("compute", "wait"))
        self.sent_bytes = np.array([x.sent_bytes for x in programs.values()])[played]
        self.peak_bytes = np.array([x.peak_bytes for x in programs.values()])[played]

    def __repr__(self) -> str:
        share = float((self.waiting / np.maximum(self.ends, 1e-300)).mean())
        return f"Outcome({self.ends.size} ranks, {self.seconds:.6g} s, {share:.1%} waiting)"

    @property
    def limit(self) -> str:
        """The largest part of the time: "compute", "imbalance" or "communication"."""
        busy = float(self.busy.max())
        mean = float(self.busy.mean())
        return limit_of(mean, busy - mean, self.seconds - busy)

    def why_slower(self, best: Outcome) -> str:
        """Return a text that says why this step is slower than the step `best`."""
        waiting, busy = (
            float(getattr(self, kind).max() - getattr(best, kind).max())
            for kind in ("waiting", "busy")
        )
        return slower_for(waiting, busy)

    @cached_property
    def exposure(self) -> Exposure:
        """The communication that computation does not hide, as `seqpar.exposure` measures it.

        The programs are played again without messages, and again without attention.
        """
        without, communication = (
            float(_ends(self._replay(*modes)).max()) for modes in ((False, True), (True, False))
        )
        return Exposure(((self.seconds, without, communication),))

    @cached_property
    def trace(self) -> Trace:
        """The trace of the whole step, from time 0, of the ranks that were simulated."""
        trace = Trace()
        trace.events = [*chain.from_iterable(self._events.values())]
        return trace

    def write(self, path: str | Path) -> None:
        """Write the trace for Perfetto and chrome://tracing, as `Trace.write` does."""
        self.trace.write(path)


def _ends(events: dict[int, list[Event]]) -> Floats:
    return np.array([max((x.stop for x in each), default=0.0) for each in events.values()])


def _spent(events: dict[int, list[Event]], kind: str) -> Floats:
    seconds = [sum(x.stop - x.start for x in each if x.kind == kind) for each in events.values()]
    return np.array(seconds)


def limit_of(compute: float, imbalance: float, communication: float) -> str:
    parts = {"compute": compute, "imbalance": imbalance, "communication": communication}
    return max(parts, key=lambda name: parts[name])


def slower_by(seconds: float, best: float) -> str:
    slower = seconds / best - 1 if best else 0.0
    return AS_FAST if slower < 5e-4 else f"{slower:.1%} slower"


def slower_for(waiting: float, busy: float) -> str:
    return "messages are less hidden" if waiting > busy else "its busiest rank computes longer"
