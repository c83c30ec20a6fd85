"""Traces: what they record, whom waits name, and the exposed fraction."""

import json
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar import Layout
from seqpar.comm.messages.comm import Comm, Pending
from seqpar.core.hooks import set_hooks
from tests.support.cases import STRATEGIES, module
from tests.support.servers import wait_until


def call(attn, layout, backward=True):
    rank = attn.rank
    q, k, v = (
        torch.randn(layout.tokens_on(rank), heads, 8, requires_grad=True) for heads in (6, 3, 3)
    )
    out = attn(q, k, v, layout, causal=False)
    if backward:
        out.sum().backward()
    return attn.mask_area(q, k, v, layout, causal=False)


def traced(group, strategy, path):
    attn, layout = module(strategy, group), Layout.zigzag(96, 4)
    comm = attn._bound.comm
    before = comm.sent_bytes
    with seqpar.trace() as trace:
        areas = call(attn, layout)
    sent = comm.sent_bytes - before
    together = trace.gather(group)
    if comm.rank == 0:
        together.write(path)
    return (
        [event for event in together.events if event.rank == comm.rank],
        len(together.events),
        sent,
        areas[comm.rank],
    )


def joined(areas, groups):
    """Areas of each group of heads, with the halves of the own block, first and last, as one."""
    size, found = len(areas) // groups, []
    for start in range(0, len(areas), size):
        first, *others, last = areas[start : start + size]
        found += [first + last, *others]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_trace_has_all_work_messages_and_waits(pool, strategy, tmp_path):
    results = pool(4, traced, strategy, tmp_path / "trace.json")
    for rank, (events, total, sent, areas) in enumerate(results):
        assert total == sum(len(mine) for mine, *_ in results)
        assert sum(event.bytes for event in events) == sent
        assert all(event.start <= event.stop <= time.time() for event in events)
        assert {event.what.split(",")[0] for event in events} == {
            f"{strategy} forward",
            f"{strategy} backward",
        }
        for what in ("forward", "backward"):
            computes = [event for event in events if event.kind == "compute" and what in event.what]
            assert [event.step for event in computes] == list(range(len(computes)))
            found, steps = [event.area for event in computes], [area for area in areas if area]
            if len(steps) == 1 or strategy == "mesh":  # all of a rank, in whatever order
                found, steps = [sum(found)], [sum(steps)]
            elif len(found) != len(steps):
                found = joined(found, groups=2 if strategy == "usp" else 1)
            assert found == steps
        waits, flights = (
            [event for event in events if event.kind == kind] for kind in ("wait", "flight")
        )
        assert len(waits) == len(flights) > 0
        assert all(event.peers for event in waits) and all(
            bool(event.peers) == bool(event.bytes) for event in flights
        )
        assert all(rank not in event.peers for event in waits + flights)
    shown = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in shown} == {0, 1, 2, 3}
    assert sum(event["ph"] == "X" for event in shown) == sum(
        event.kind != "flight" for events, *_ in results for event in events
    )


def slow_rank(group, shared):
    """Rank 2 of 4 comes a second after the others wait: what each rank waited for longest.

    The ranks share the time, which passes in rank 2 only, and how many waits each has begun.
    """
    times = torch.from_file(str(shared), shared=True, size=5)
    rank, waits, clock = dist.get_rank(group), times[:4], times[4]
    attn, layout = seqpar.RingAttention(group), Layout.zigzag(64, 4)
    call(attn, layout)
    wait = Pending.wait

    def counted(pending):
        waits[rank] += not pending.contexts  # traced waits have begun: contexts are entered first
        wait(pending)

    with (
        mock.patch.object(time, "perf_counter", clock.item),
        mock.patch.object(Pending, "wait", counted),
        seqpar.trace() as trace,
    ):
        if rank == 2:
            wait_until(lambda: waits.tolist() == [2, 1, 0, 1])
            clock += 1
        call(attn, layout, backward=False)
    return next(iter(trace.waited_for().items()))


def test_waits_name_the_slow_rank_and_the_step(pool, tmp_path):
    """Ranks 3 and 0 wait for rank 2 at their steps 1 and 2; rank 1 for one that itself waits; rank
    2 for nobody."""
    first, second, late, third = pool(4, slow_rank, tmp_path / "times")
    assert first == (("ring forward", 2, (2,)), 1.0) and third == (("ring forward", 1, (2,)), 1.0)
    assert second[1] == 1.0 and late[1] == 0.0


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.now = 0.0

    def seconds(self):
        return self.now

    def pass_until(self, when):
        self.now = max(self.now, when)


class Late(Pending):
    """Messages that take 150 ms, all of them at the same time."""

    def __init__(self, pending, clock):
        super().__init__([], [])
        self._pending, self._clock, self._ready = pending, clock, clock.now + 0.15

    def wait(self):
        self._clock.pass_until(self._ready)
        self._pending.wait()


def exposed(group, compute_seconds):
    """The exposure of a ring's forward on 2 ranks: its one exchange takes 150 ms, each of its 2
    computes a given time."""
    attn, layout = seqpar.RingAttention(group), Layout.contiguous(64, 2)
    comm, clock = attn._bound.comm, Clock()
    comm.start = lambda *messages: Late(Comm.start(comm, *messages), clock)
    area = attn.mask_area(
        *(torch.zeros(32, heads, 8) for heads in (6, 3, 3)), layout, causal=False
    ).max()

    def compute(pairs):
        clock.now += pairs / area * compute_seconds

    try:
        with (
            mock.patch.object(time, "perf_counter", clock.seconds),
            set_hooks(replace_compute=compute),
        ):
            return seqpar.exposure(lambda: call(attn, layout, backward=False), group, rounds=3)
    finally:
        del comm.start


@pytest.mark.parametrize(("compute_seconds", "fraction"), [(0.03, 0.8), (0.09, 0.4), (0.24, 0.0)])
def test_exposure_is_the_time_that_communication_adds(pool, compute_seconds, fraction):
    first, second = pool(2, exposed, compute_seconds)
    assert first == second
    assert first.fractions == pytest.approx([fraction] * 3, abs=1e-9)
