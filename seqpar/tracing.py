"""Tracing: what a rank computed, sent and waited for, step by step; and how much of its communication was not hidden.

`with seqpar.trace() as trace:` records; `trace.write(path)` writes what chrome://tracing and Perfetto show. Time spent
waiting does not say how much communication costs (it also slows the compute that it hides under), so `seqpar.exposure`
measures that by leaving it out.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from seqpar.geometry import as_int

if TYPE_CHECKING:
    from seqpar.comm import Group, Message

_Block = TypeVar("_Block")
ROWS = ("compute", "wait", "flight")  # the kinds of events, in the order in which they are shown
Moment = float | torch.cuda.Event  # seconds, or a point in a CUDA stream that becomes seconds at the end


@dataclass
class Event:
    """One thing that a rank did: `kind` is "compute", "wait" or "flight" (an exchange, from its post to the end of its wait).

    `what` names the strategy and its pass, as in "ring backward"; `step` is the strategy's, of a compute the number of those
    before it in this pass. `peers` are the ranks that a flight went to, or that a wait was for; `bytes` is what a flight
    sent, and `area` the pairs of query and key that a compute is over, times query heads; of linear attention, as many as cost
    the same. Times are seconds since the epoch, by this rank's clock.
    """

    kind: str
    what: str
    step: int
    start: Any
    stop: Any
    rank: int = 0
    peers: tuple[int, ...] = ()
    bytes: int = 0
    area: int = 0


class Trace:
    """The events of this process within `seqpar.trace()`, complete once that has ended."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._computed: Counter[str] = Counter()
        self._doing, self._rank = "", 0
        self._base = time.time() - time.perf_counter()
        self._first = _cuda_moment() if torch.cuda.is_available() else None
        self._first_time = time.perf_counter()

    def begin(self, what: str, rank: int) -> None:
        """A strategy begins a pass."""
        self._doing, self._rank = what, rank
        self._computed[what] = 0

    def compute(self, start: Moment, stop: Moment, area: int) -> None:
        step = self._computed[self._doing]
        self._computed[self._doing] += 1
        self.events.append(Event("compute", self._doing, step, start, stop, self._rank, area=area))

    def end(self) -> None:
        """Turn all moments into seconds."""
        for event in self.events:
            event.start, event.stop = self._seconds(event.start), self._seconds(event.stop)

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return self._base + moment
        assert self._first is not None
        moment.synchronize()
        return self._base + self._first_time + self._first.elapsed_time(moment) / 1e3

    def waited_for(self) -> dict[tuple[str, int, tuple[int, ...]], float]:
        """Seconds waited by (strategy and pass, step, peers), longest first: a slow rank or link stands out."""
        waits: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
        for event in self.events:
            if event.kind == "wait":
                waits[event.what, event.step, event.peers] += event.stop - event.start
        return dict(waits.most_common())

    def gather(self, group: Group) -> Trace:
        """The events of all ranks of a group, on every rank. Their clocks are taken to agree."""
        from seqpar.comm import Comm

        together = Trace()
        for text in Comm.of(group).all_gather_text(json.dumps([asdict(event) for event in self.events])):
            together.events += [Event(**event | {"peers": tuple(event["peers"])}) for event in json.loads(text)]
        return together

    def write(self, path: str | Path) -> None:
        """Chrome's trace format, which Perfetto opens too: a process a rank, with computes, waits and flights."""
        events: list[dict[str, Any]] = []
        for number, event in enumerate(self.events):
            peers = ", ".join(map(str, event.peers))
            name = f"{event.what}, step {event.step}" + (f": rank {peers}" if peers else "")
            common = {"name": name, "cat": event.kind, "pid": event.rank, "tid": ROWS.index(event.kind)}
            details = {key: getattr(event, key) for key in ("bytes", "area") if getattr(event, key)}
            start, stop = event.start * 1e6, event.stop * 1e6
            if event.kind == "flight":  # flights overlap
                events.append(common | {"ph": "b", "id": number, "ts": start, "args": details})
                events.append(common | {"ph": "e", "id": number, "ts": stop})
            else:
                events.append(common | {"ph": "X", "ts": start, "dur": stop - start, "args": details})
        for rank in {event.rank for event in self.events}:
            events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
            for row, kind in enumerate(ROWS):
                events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": kind}})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


class Flight:
    """An exchange that is being traced: posted, then waited for, then ended."""

    def __init__(self, what: str, step: int, rank: int, sends: list[Message], recvs: list[Message]) -> None:
        assert current is not None
        self._trace, self._device = current, (sends or recvs)[0][1].device
        self._event = Event("flight", what, step, 0.0, 0.0, rank)
        self._to, self._from = (tuple(sorted({peer for peer, _ in part})) for part in (sends, recvs))
        self._bytes = sum(tensor.nbytes for _, tensor in sends)
        self._posted = moment(self._device)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        waited = moment(self._device)
        yield
        now = moment(self._device)
        self._trace.events += [
            replace(self._event, start=self._posted, stop=now, peers=self._to, bytes=self._bytes),
            replace(self._event, kind="wait", start=waited, stop=now, peers=self._from or self._to),
        ]


@contextmanager
def computing(area: Callable[[], int], device: torch.device) -> Iterator[bool]:
    """Around a compute: whether to do it, or else it has been replaced. `area` is that of its mask, times query heads."""
    if stand_in is None and current is None:
        yield True
        return
    start = moment(device)
    if stand_in is not None:
        stand_in(area())
    yield stand_in is None
    if current is not None:
        current.compute(start, moment(device), area())


def between(blocks: Iterable[_Block], areas: Sequence[int], device: torch.device) -> Iterator[_Block]:
    """The blocks; what is done with each before the next is asked for counts as a compute of its area."""
    remaining = iter(areas)
    for block in blocks:
        start = moment(device)
        yield block
        del block  # before the next one is asked for
        if current is not None:
            current.compute(start, moment(device), next(remaining))


current: Trace | None = None  # what records now
silent = False  # whether exchanges send nothing
stand_in: Callable[[int], None] | None = None  # what is called with the area of each compute in its place


@contextmanager
def trace() -> Iterator[Trace]:
    """Record what this process's attention calls compute, send and wait for, forward and backward.

    On a GPU the moments are those of the compute stream: a wait is the time for which it stood still.
    """
    global current
    before, current = current, Trace()
    try:
        yield current
    finally:
        recorded, current = current, before
        recorded.end()


@contextmanager
def without_communication() -> Iterator[None]:
    """Within the context exchanges send nothing and what should have arrived is arbitrary: for timing only."""
    global silent
    before, silent = silent, True
    try:
        yield
    finally:
        silent = before


@contextmanager
def compute_replaced(by: Callable[[int], None]) -> Iterator[None]:
    """Within the context `by(area)` is called in place of each compute, and results are arbitrary: for timing only.

    `area` is the number of pairs of query and key that see each other, times query heads.
    """
    global stand_in
    before, stand_in = stand_in, by
    try:
        yield
    finally:
        stand_in = before


def moment(device: torch.device) -> Moment:
    return _cuda_moment() if device.type == "cuda" else time.perf_counter()


def _cuda_moment() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Exposure:
    """Medians over rounds, in seconds, of the slowest rank's time of a step: whole, without and by communication alone."""

    total: float
    without_communication: float
    communication: float

    @property
    def fraction(self) -> float:
        """The share of communication that is not hidden: (total − without_communication) / communication."""
        return (self.total - self.without_communication) / self.communication


def exposure(step: Callable[[], object], group: Group, rounds: int = 5) -> Exposure:
    """How much of the communication of `step`, which all ranks of `group` call, is not hidden under compute.

    The step is run in three ways, in turn: as it is, with exchanges that send nothing, and with no attention computed; each
    once to warm up and then `rounds` times. Of the latter two the results are arbitrary, so a step must not
    update what you want to keep. The numbers are the same on all ranks. Time that ranks spend waiting for each other
    because their work is uneven counts as exposed: zigzag layouts avoid it.
    """
    from seqpar.comm import Comm

    comm, rounds = Comm.of(group), as_int("rounds", rounds, 1)

    def timed() -> float:
        _synchronize()
        comm.all_gather(torch.zeros(1, device=comm.device))  # all begin together
        start = time.perf_counter()
        step()
        _synchronize()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=comm.device)
        return max(float(x) for x in comm.all_gather(seconds))

    times: tuple[list[float], ...] = ([], [], [])
    for number in range(rounds + 1):
        whole = timed()
        with without_communication():
            compute = timed()
        with compute_replaced(lambda area: None):
            communication = timed()
        if number:
            for samples, seconds in zip(times, (whole, compute, communication), strict=True):
                samples.append(seconds)
    return Exposure(*map(statistics.median, times))
