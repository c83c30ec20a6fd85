"""The seconds that a device takes for the computation in programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from seqpar.costs.device import Device
from seqpar.costs.grid import Tasks
from seqpar.simulate.recording.program import (
    Compute,
    LinearCompute,
    Operators,
    Program,
    SoftmaxCompute,
)

# A function from all computations to the seconds of each, by the computation's `id`.
Pricing = Callable[[list[Compute]], Mapping[int, float]]


def computes(programs: Iterable[Program]) -> list[Compute]:
    return [x for program in programs for x in program.each() if isinstance(x, Compute)]


def price(device: Device, calls: list[Compute]) -> dict[int, float]:
    """Return the seconds of each computation, as a dict from the `id()` of the computation.

    The seconds of softmax attention are interpolated in the device's measured grid.
    """
    seconds: dict[int, float] = {}
    alike: dict[tuple[int, int, bool], list[Compute]] = defaultdict(list)
    for compute in calls:
        work = compute.work
        if isinstance(work, SoftmaxCompute):
            alike[work.heads, work.head_dim, work.backward].append(compute)
        elif isinstance(work, LinearCompute):
            seconds[id(compute)] = _linear(device, work)
        else:
            seconds[id(compute)] = _operators(device, work)
    for (heads, head_dim, backward), group in alike.items():
        tasks = [x.work.tasks for x in group if isinstance(x.work, SoftmaxCompute)]
        owner = np.repeat(np.arange(len(tasks)), [x.rows.size for x in tasks])
        columns = zip(*((x.rows, x.keys, x.pairs, x.windowed) for x in tasks), strict=True)
        joined = Tasks(*(np.concatenate([np.ravel(x) for x in column]) for column in columns))
        each = device.attention.together(joined, heads, head_dim, backward, owner, len(tasks))
        seconds |= {id(call): x for call, x in zip(group, each.tolist(), strict=True)}
    return seconds


def _linear(device: Device, work: LinearCompute) -> float:
    recurrent = device.recurrent
    per_token = recurrent.work(work.tokens, work.heads, *work.dims, work.backward)
    per_call = recurrent.call[work.backward] if work.tokens else 0.0
    return work.share * (per_call + float(per_token))


def _operators(device: Device, work: Operators) -> float:
    touched = work.bytes / device.memory_bandwidth + work.new_bytes * device.new_memory
    return work.flops / device.reached_rate + touched + work.calls * device.operator
