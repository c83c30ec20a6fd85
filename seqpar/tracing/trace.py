"""Traces: what a rank computed, sent and waited for, step by step."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from seqpar.comm.messages.comm import Comm, Group
from seqpar.comm.messages.message_header import Message
from seqpar.core.arguments import as_path
from seqpar.core.hooks import Moment, TracedWork, hooks, moment, put_hooks

ChromeEvent = dict[str, object]  # a JSON object of Chrome's trace format
EVENT_KINDS = ("compute", "wait", "flight")  # in the order of the rows of the picture


@dataclass
class Event:
    """One event of a rank."""

    # "compute", "wait" or "flight", which lasts from the post of messages to the end of the wait.
    kind: str
    what: str  # the strategy and its pass, such as "ring backward"
    # The step of the strategy; for a compute, the number of earlier computes in this pass.
    step: int
    start: Any  # seconds since the epoch, by this rank's clock
    stop: Any
    rank: int = 0  # the rank of the event
    peers: tuple[int, ...] = ()  # the receivers of a flight, or the ranks for which a wait waited
    bytes: int = 0  # the bytes that a flight sent
    area: int = 0  # (query, key) pairs × query heads, or the equivalent cost of linear attention


class Trace:
    """The events of a thread's calls within `seqpar.trace()`.

    After the end of the context, events are complete, and their times are in seconds.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._computes: Counter[str] = Counter()
        self._label, self._rank = "", 0
        self._epoch = time.time() - time.perf_counter()

    def begin(self, label: str, rank: int) -> None:
        self._label, self._rank = label, rank
        self._computes[label] = 0

    def compute(self, start: Moment, stop: Moment, work: TracedWork) -> None:
        step = self._computes[self._label]
        self._computes[self._label] += 1
        self.events.append(
            Event("compute", self._label, step, start, stop, self._rank, area=work.area)
        )

    def exchange(
        self,
        label: str,
        step: int,
        rank: int,
        sends: Sequence[Message],
        recvs: Sequence[Message],
    ) -> Callable[[], AbstractContextManager[None]]:
        device = (sends or recvs)[0][1].device
        flight = Event("flight", label, step, moment(device), 0.0, rank)
        flight.bytes = sum(tensor.nbytes for _, tensor in sends)
        flight.peers = tuple(sorted({peer for peer, _ in sends}))
        awaited = tuple(sorted({peer for peer, _ in recvs})) or flight.peers

        @contextmanager
        def waiting() -> Iterator[None]:
            begun = moment(device)
            yield
            ended = moment(device)
            self.events += [
                replace(flight, stop=ended),
                Event("wait", label, step, begun, ended, rank, awaited),
            ]

        return waiting

    def end(self) -> None:
        """Convert the times of all events to seconds."""
        seconds = cache(_seconds_of_now)
        for event in self.events:
            for name in ("start", "stop"):
                when = getattr(event, name)
                if isinstance(when, torch.cuda.Event):
                    now, at = seconds(when.device)
                    when = at - when.elapsed_time(now) / 1e3
                setattr(event, name, self._epoch + when)

    def waited_for(self) -> dict[tuple[str, int, tuple[int, ...]], float]:
        """Return the seconds of waiting by (strategy and pass, step, peers), the longest first.

        The first entry therefore shows a slow rank or link.
        """
        waits: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
        for event in self.events:
            if event.kind == "wait":
                waits[event.what, event.step, event.peers] += event.stop - event.start
        return dict(waits.most_common())

    def gather(self, group: Group) -> Trace:
        """Return the events of all ranks of a group, on every rank.

        Times are not corrected, so the clocks of the ranks must be synchronised.
        """
        text = json.dumps([asdict(event) for event in self.events])
        gathered = Trace()
        for of_rank in Comm.of(group).all_gather_text(text, label="trace gather"):
            for event in json.loads(of_rank):
                gathered.events.append(Event(**event | {"peers": tuple(event["peers"])}))
        return gathered

    def write(self, path: str | Path) -> None:
        """Write the computes, waits and flights in Chrome's trace format, with one process per
        rank.

        Perfetto (ui.perfetto.dev) and chrome://tracing open the file.
        """
        shown: list[ChromeEvent] = []
        for number, event in enumerate(self.events):
            shown += _shown(number, event)
        for rank in {event.rank for event in self.events}:
            shown.append(_named("process", {"pid": rank}, f"rank {rank}"))
            for thread, kind in enumerate(EVENT_KINDS):
                shown.append(_named("thread", {"pid": rank, "tid": thread}, kind))
        as_path("path", path).write_text(
            json.dumps({"traceEvents": shown, "displayTimeUnit": "ms"})
        )


def _seconds_of_now(device: torch.device) -> tuple[torch.cuda.Event, float]:
    """Return the present time twice: as a CUDA event, and in seconds."""
    torch.cuda.synchronize(device)
    now = moment(device)
    assert isinstance(now, torch.cuda.Event)
    now.synchronize()
    return now, time.perf_counter()


def _shown(number: int, event: Event) -> list[ChromeEvent]:
    """Return an event in Chrome's trace format. The flight of a message becomes two objects, one
    for its start and one for its end.
    """
    peers = ", ".join(map(str, event.peers))
    common: ChromeEvent = {
        "name": f"{event.what}, step {event.step}" + (f": rank {peers}" if peers else ""),
        "cat": event.kind,
        "pid": event.rank,
        "tid": EVENT_KINDS.index(event.kind),
    }
    details = {name: getattr(event, name) for name in ("bytes", "area") if getattr(event, name)}
    start, stop = event.start * 1e6, event.stop * 1e6
    if event.kind != "flight":
        return [common | {"ph": "X", "ts": start, "dur": stop - start, "args": details}]
    return [  # flights overlap, but events with a duration ("X") must not
        common | {"ph": "b", "id": number, "ts": start, "args": details},
        common | {"ph": "e", "id": number, "ts": stop},
    ]


def _named(kind: str, ids: dict[str, int], name: str) -> ChromeEvent:
    return {"name": f"{kind}_name", "ph": "M", "args": {"name": name}, **ids}


@contextmanager
def trace() -> Iterator[Trace]:
    """Record what this thread's attention calls compute, send and wait for, forward and backward.

    The trace also contains what threads of autograd and of seqpar do for these calls. On a GPU,
    times are measured on the current stream, and a wait is the time for which the stream was
    blocked. If there are several traces at the same time, the one that began last records.
    """
    recorded = Trace()
    put_hooks(traces=(*hooks().traces, recorded))
    try:
        yield recorded
    finally:
        put_hooks(traces=tuple(x for x in hooks().traces if x is not recorded))
        recorded.end()
