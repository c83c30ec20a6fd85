"""WLB-LLM's packing, without deferring documents, as predicted steps.

Wang et al., "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training" (2025).
The longest document goes first, to the micro-batch with the least predicted time that has room in
its memory. Then each document is cut over the ranks of a context parallel group, head and tail. The
ranks first gather all keys.
"""

from __future__ import annotations

import numpy as np

from benchmarks.balance.units import WAYS, Machine
from seqpar.balance import Tasks
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats, causal_pairs

SLACK = 1.25  # tokens for which a micro-batch has memory, over the mean


def wlb(machine: Machine, lengths: Ints, units: int, stages: int, batches: int) -> list[float]:
    """Return the seconds of a step with WLB-LLM's packing, and the share in which units idle.

    The best size of context parallel groups is taken; the idle share is for groups of one.
    """
    found, idle, size = [], 0.0, 1
    while size <= units // stages:
        replicas = units // stages // size
        seconds = wlb_times(machine, lengths, replicas * batches, size)
        order = np.argsort(-seconds.sum(0))
        rows = order.reshape(batches, replicas)
        rows[1::2] = rows[1::2, ::-1]  # in alternating order, so that replicas get about equal work
        steps = [one_f_one_b(seconds[:, rows[:, i]] / stages, stages) for i in range(replicas)]
        found.append(max(steps))
        if size == 1:
            busy = seconds.sum() / (replicas * stages)
            idle = 1 - busy / max(steps)
        size *= 2
    return [min(found) * machine.layers, idle]


def wlb_times(machine: Machine, lengths: Ints, bins: int, size: int) -> Floats:
    """Return (2, bins) the seconds of one layer of micro-batches, on groups of `size` units."""
    weights, order = machine.weights(lengths), np.argsort(-lengths, kind="stable")
    limit = SLACK * lengths.sum() / bins
    load, tokens = np.zeros(bins), np.zeros(bins, np.int64)
    owner = np.zeros(lengths.size, np.int64)
    for document in order.tolist():
        fits = tokens + lengths[document] <= limit
        chosen = int(np.argmin(np.where(fits, load, np.inf) if fits.any() else tokens))
        owner[document] = chosen
        load[chosen] += weights[document]
        tokens[chosen] += lengths[document]
    chunks = 1 if size == 1 else 2  # chunks of a document per rank, each a task of a call
    rows, pairs = lengths / (chunks * size), causal_pairs(0 * lengths, lengths) / (chunks * size)
    calls = Tasks.of(np.tile(rows, chunks), np.tile(lengths, chunks), np.tile(pairs, chunks))
    gathered = tokens * machine.row_bytes.key * (size - 1) / size
    return np.stack(
        [
            machine.linear(tokens / size, way)
            + machine.attention(calls, np.tile(owner, chunks), bins, way)
            + machine.travel(gathered)
            for way in WAYS
        ]
    )


def one_f_one_b(seconds: Floats, stages: int) -> float:
    """Return the seconds of a pipeline in 1F1B order; micro-batches take (2, n) on each stage."""
    count = seconds.shape[1]
    clock = np.zeros(stages)
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, count)
        order = [(0, i) for i in range(ahead)]
        for i in range(count):
            order += [(1, i)] + ([(0, ahead + i)] if ahead + i < count else [])
        orders.append(order)
    done, place = np.full((2, stages, count), np.inf), [0] * stages
    while any(place[s] < len(orders[s]) for s in range(stages)):
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                way, i = orders[stage][place[stage]]
                if way:
                    ready = done[0, stage, i] if stage == stages - 1 else done[1, stage + 1, i]
                else:
                    ready = 0.0 if stage == 0 else done[0, stage - 1, i]
                if ready == np.inf:
                    break
                clock[stage] = max(clock[stage], ready) + seconds[way, i]
                done[way, stage, i] = clock[stage]
                place[stage] += 1
    return float(clock.max())
