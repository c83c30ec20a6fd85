"""Gated DeltaNet under context parallelism: 32K tokens on four H800, compared with fla-core.

The time of one device is published. A rank takes its share of it, times the additional work for
maps: the FLOPs of our code (the backend `aten`) for tokens in the middle of a document, over the
FLOPs for a whole document. Messages take the time of the cluster's links for the bytes of
`traffic`, and are hidden by work that does not wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.recurrent.kernels import inputs_of
from seqpar import Layout, RecurrentAttention
from seqpar.balance import Cluster
from seqpar.comm.messages.comm import Comm
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.kinds import kind
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.routes import SpanStates

KIND, TOKENS, RANKS, HEADS, DIM, ITEM = "gated_delta", 2**15, 4, 64, 128, 2
CLUSTER = Cluster.preset(f"1x{RANKS}-h800")
BOTH = ("forward", "backward")
PASSES = {"forward": BOTH[:1], "forward + backward": BOTH}
ALONE = {"forward": 4.808, "backward": 15.560 - 4.808}  # ms on one device, published
# Calls of fla's forward and of its backward that the backend "fla" makes in a pass on a rank in the
# middle of a document. A call whose values have K more columns, for the map, counts as two.
CALLS = {"forward": (2, 0), "backward": (2, 1)}
ROWS = 512  # for the count of FLOPs, which are the same for each chunk


class Work(NamedTuple):
    """FLOPs of a pass: before maps are sent, while they travel, and after they arrive."""

    making: int
    within: int
    finishing: int


def solving(lower: Any, x: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of solving a triangular system, which torch does not count."""
    return math.prod(x) * x[-2]


def counted(step: Callable[[], Any]) -> tuple[Any, int]:
    """Return a step's result and its FLOPs."""
    solves = {torch.ops.aten.linalg_solve_triangular: solving}
    with FlopCounterMode(display=False, custom_mapping=solves) as counter:
        result = step()
    return result, counter.get_total_flops()


@cache
def work(direction: str, middle: bool) -> Work:
    """Return the work on a head's rows, in the middle of a document or for a whole document."""
    state = np.array([0 if middle else -1])
    spans = SpanStates(np.array([0, ROWS]), state, state)
    states = torch.zeros(1, 1, 1, DIM, DIM) if middle else None
    inputs, dout = inputs_of(KIND, ROWS, 1, DIM)
    options = MapOptions(kind(KIND), DIM**-0.5, "aten")

    def begin() -> Any:
        if direction == "forward":
            return begin_forward(inputs, spans, options)
        return begin_backward(inputs, dout, spans, options, states)

    steps, making = counted(begin)
    _, within = counted(steps.local)
    return Work(making, within, counted(lambda: steps.finish(states))[1])


@cache
def gathered(direction: str) -> float:
    """Return the milliseconds of the messages with maps, on the busiest device."""
    layout, sent = Layout.contiguous(TOKENS, RANKS), np.zeros((RANKS, RANKS))
    q = torch.empty(TOKENS // RANKS, HEADS, DIM, dtype=torch.bfloat16, device="meta")
    gate = torch.empty(TOKENS // RANKS, HEADS, device="meta")
    for rank in range(RANKS):
        rec = RecurrentAttention(Comm("papers", rank, RANKS), KIND)
        for row in rec.traffic(q, q, q, layout, log_decay=gate, beta=gate):
            sent[rank, row.peer] += row.bytes * (row.direction == direction)
    return moved(float(max(sent.sum(0).max(), sent.sum(1).max())))


def moved(size: float) -> float:
    """Return the milliseconds of a message of `size` bytes."""
    return 1e3 * (CLUSTER.inside.latency + size / CLUSTER.inside.rate)


def more(direction: str) -> float:
    """Return the work on tokens in the middle of a document, over a whole document's."""
    return sum(work(direction, True)) / sum(work(direction, False))


def by_maps(direction: str) -> float:
    """Return the milliseconds of a pass that gathers maps."""
    part = work(direction, True)
    each = ALONE[direction] / RANKS / sum(work(direction, False))
    hidden = max(each * part.within, gathered(direction))
    return each * (part.making + part.finishing) + hidden


def by_functions(direction: str) -> float:
    """Return the milliseconds with the backend "fla", which hides no message."""
    calls = zip(CALLS[direction], BOTH, strict=True)
    return sum(n * ALONE[each] / RANKS for n, each in calls) + gathered(direction)


def by_heads(direction: str) -> float:
    """Return the milliseconds of a pass that exchanges q, k, v, both gates and out by heads."""
    rows = TOKENS // RANKS * HEADS * ITEM * (RANKS - 1) / RANKS
    return ALONE[direction] / RANKS + 4 * moved(rows * DIM) + 2 * moved(rows)


def total(way: Callable[[str], float], passes: str) -> float:
    """Return the milliseconds of passes."""
    return sum(map(way, PASSES[passes]))


def predict(mini: bool) -> dict[str, float]:
    """Return the milliseconds of both ways, and their shares of an ideal division."""
    found, ideal = {}, sum(ALONE.values()) / RANKS
    for what, way in (("maps by all_gather", by_maps), ("all-to-all of heads", by_heads)):
        for passes in PASSES:
            found[f"{passes}, {what}"] = took = total(way, passes)
        found[f"{passes}, {what}: of ideal"] = 100 * ideal / took
    for passes in PASSES:
        found[f'{passes}, maps by the backend "fla"'] = total(by_functions, passes)
    return found
