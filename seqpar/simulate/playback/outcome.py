"""Outcome: what happened when programs were played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqpar.costs.grid import Floats
from seqpar.simulate.recording.program import Program
from seqpar.tracing.exposure import Exposure
from seqpar.tracing.trace import Event, Trace

AS_FAST = "as fast"


class Entry(NamedTuple):
    """One thing that a rank did; the names are those of `seqpar.tracing.trace.Event`."""

    kind: str
    what: str
    step: int
    start: float
    stop: float
    peers: tuple[int, ...] = ()
    bytes: int = 0
    area: int = 0


class Outcome:
    """When each rank computed, sent and waited, in seconds from the start of the step.

    Attributes:
        seconds: until the last rank was done.
        ends: (ranks,) when each was.
        busy: (ranks,) seconds in which each computed.
        waiting: (ranks,) seconds in which each waited for messages.
        sent_bytes: (ranks,) bytes that each sent.
        peak_bytes: (ranks,) the most that tensors held at once which its step made.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        entries: list[list[Entry]],
        replay: Callable[[bool, bool], list[list[Entry]]],
    ) -> None:
        self._entries, self._replay = entries, replay
        self.ends = _ends(entries)
        self.seconds = float(self.ends.max())
        self.busy, self.waiting = (_spent(entries, kind) for kind in ("compute", "wait"))
        self.sent_bytes = np.array([x.sent_bytes for x in programs])
        self.peak_bytes = np.array([x.peak_bytes for x in programs])

    def __repr__(self) -> str:
        share = float((self.waiting / np.maximum(self.ends, 1e-300)).mean())
        return f"Outcome({self.ends.size} ranks, {self.seconds:.6g} s, {share:.1%} waiting)"

    @property
    def limit(self) -> str:
        """What takes most of the time: "compute", "imbalance" or "communication"."""
        busy = float(self.busy.max())
        mean = float(self.busy.mean())
        return limit_of(mean, busy - mean, self.seconds - busy)

    def why_slower(self, best: Outcome) -> str:
        """Return in what the step is behind a faster one."""
        waiting, busy = (
            float(getattr(self, kind).max() - getattr(best, kind).max())
            for kind in ("waiting", "busy")
        )
        return slower_for(waiting, busy)

    @cached_property
    def exposure(self) -> Exposure:
        """What of the communication is not hidden, as `seqpar.exposure` measures it.

        The programs are played without messages, and without attention.
        """
        without, communication = (
            float(_ends(self._replay(*modes)).max()) for modes in ((False, True), (True, False))
        )
        return Exposure(((self.seconds, without, communication),))

    @cached_property
    def trace(self) -> Trace:
        """All that happened, in the form of a trace: times begin at 0."""
        trace = Trace()
        for rank, entries in enumerate(self._entries):
            for x in entries:
                times = x.start, x.stop
                event = Event(x.kind, x.what, x.step, *times, rank, x.peers, x.bytes, x.area)
                trace.events.append(event)
        return trace

    def write(self, path: str | Path) -> None:
        """Write the trace as `Trace.write` does, for Perfetto and chrome://tracing."""
        self.trace.write(path)


def _ends(entries: list[list[Entry]]) -> Floats:
    return np.array([max((x.stop for x in each), default=0.0) for each in entries])


def _spent(entries: list[list[Entry]], kind: str) -> Floats:
    """Return (ranks,) the seconds that each spent on entries of a kind."""
    return np.array([sum(x.stop - x.start for x in each if x.kind == kind) for each in entries])


def limit_of(compute: float, imbalance: float, communication: float) -> str:
    """Return which of these seconds are most."""
    parts = {"compute": compute, "imbalance": imbalance, "communication": communication}
    return max(parts, key=lambda name: parts[name])


def slower_by(seconds: float, best: float) -> str:
    """Return how much slower something is than the best, in words."""
    slower = seconds / best - 1 if best else 0.0
    return AS_FAST if slower < 5e-4 else f"{slower:.1%} slower"


def slower_for(waiting: float, busy: float) -> str:
    """Return why something is slower by so many seconds of waiting, and of computing."""
    return "messages are less hidden" if waiting > busy else "its busiest rank computes longer"
