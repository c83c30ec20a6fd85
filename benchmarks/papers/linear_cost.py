"""A cost model of linear attention across ranks.

It gives the time of a layer, forward and backward, from a machine's constants. Each pass computes
the states of a rank's tokens, does the work within its spans, and finishes with the states that
entered. In between, messages take this time:

    LASP-2 all_gather   hidden by the work within spans:
                        α + (states that leave the busiest rank) · S / β
    LASP-2 collective   hidden by the same work: Σ hops α + the larger of the bytes that enter a
                        rank and a rank's share of the bytes that enter its node, each state once
    LASP-2 scan         hidden by the same work, in K blocks:
                        Σ hops (α + S/Kβ) + (K − 1) · the slowest hop
    LASP-1              waits for Σ hops (α + S/β)
    Ring                hidden by the computation of states:
                        h = α + (keys and values, or q and dout) / β, P − 1 times

with P − 1 hops between neighbours. An idle link accepts its burst immediately: that many bytes of a
message, or of the first of consecutive messages, cost no time. A hop within a node has its own α
and β. The library sends messages; the LASP-2 paper measured the collective, NCCL's AllGather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from seqpar.core.hooks import set_hooks
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.state_options import StateOptions

BLOCKS = 4  # as in LASP2Attention


@dataclass(frozen=True)
class Pass:
    """A rank's work, as areas in the sense of traces, and the bytes that may travel."""

    making: int
    within: int
    finishing: int
    state: int  # bytes of a rank's state
    block: int  # bytes of a rank's keys and values, or of its q and dout

    @property
    def area(self) -> int:
        return self.making + self.within + self.finishing


def passes(tokens: int, heads: int, dim: int, itemsize: int = 2) -> list[Pass]:
    """Return forward and backward with `tokens` tokens per rank."""
    x = torch.empty(1, tokens, heads, dim, device="meta")
    spans, options = (
        SpanStates(np.array([0, tokens]), np.array([-1]), np.array([-1])),
        StateOptions(1.0, True, "aten", None),
    )
    areas: list[int] = []
    with set_hooks(replace_compute=areas.append):
        for work in (
            lambda: begin_forward(Inputs(x, x, x), spans, options),
            lambda: begin_backward(Inputs(x, x, x), x, spans, options, None),
        ):
            begun: Any = work()
            begun.local()
            begun.finish(None)
    moved = heads * dim * dim * 4, 2 * tokens * heads * dim * itemsize
    return [Pass(*areas[:3], *moved), Pass(*areas[3:], *moved)]


@dataclass(frozen=True)
class Machine:
    """The times of a machine, in seconds.

    A rank sends to `ports` other ranks simultaneously at full rate (0: to all), and additionally to
    the ranks of its node.
    """

    ranks: int
    area: float  # per unit of area
    latency: float  # per message
    byte: float  # per byte on a link
    call: float = 0.0  # per pass
    ports: int = 0
    node: int = 1  # ranks; neighbours in a node have separate links:
    inner_latency: float = 0.0
    inner_byte: float = 0.0
    burst: int = 0  # bytes

    def hops(self, size: float) -> list[float]:
        """Return the seconds of a message to each next rank, on busy links."""
        within, across = (
            self.inner_latency + size * self.inner_byte,
            self.latency + size * self.byte,
        )
        return [across if rank % self.node == 0 else within for rank in range(1, self.ranks)]

    def saved(self, size: float) -> float:
        """Return the seconds that an idle link's burst saves."""
        return min(size, self.burst) * self.byte

    def fan(self, size: int) -> float:
        """Return the seconds of messages from one rank to all others."""
        near, far = self.node - 1, self.ranks - self.node
        queue = -(-far // (self.ports or far or 1)) * size
        across = self.latency + queue * self.byte - self.saved(queue) if far else 0.0
        return max(across, self.inner_latency + near * size * self.inner_byte)


def gathered(machine: Machine, part: Pass) -> float:
    """Return the seconds to send states to each rank."""
    return machine.fan(part.state)


def collected(machine: Machine, part: Pass) -> float:
    """Return the seconds of NCCL's AllGather of states."""
    entering = (
        (machine.ranks - machine.node) / machine.node * machine.byte,
        (machine.ranks - 1) * machine.inner_byte,
    )
    return sum(machine.hops(0)) + part.state * max(entering)


def scanned(machine: Machine, part: Pass) -> float:
    """Return the seconds of states in blocks from rank to rank."""
    block = part.state / BLOCKS
    hops = machine.hops(block)
    bursts = len(hops) * machine.saved(block) + machine.saved(part.state) - machine.saved(block)
    return sum(hops) + (BLOCKS - 1) * max(hops, default=0.0) - bursts


def passed_on(machine: Machine, part: Pass) -> float:
    """Return the seconds of whole states from rank to rank."""
    hops = machine.hops(part.state)
    return sum(hops) - len(hops) * machine.saved(part.state)


def ringed(machine: Machine, part: Pass) -> float:
    """Return the seconds of all ranks' blocks around a ring."""
    return (machine.ranks - 1) * max(machine.hops(part.block), default=0.0) - machine.saved(
        part.block
    )


COMMUNICATION: dict[str, Callable[[Machine, Pass], float]] = {
    "LASP-2 all_gather": gathered,
    "LASP-2 collective": collected,
    "LASP-2 scan": scanned,
    "LASP-1": passed_on,
    "Ring": ringed,
    "data parallel": lambda machine, part: 0.0,
}


def seconds(contender: str, machine: Machine, parts: Sequence[Pass]) -> float:
    """Return the seconds of some passes on the slowest rank."""
    return sum(_pass(contender, machine, part) for part in parts)


def communication(contender: str, machine: Machine, parts: Sequence[Pass]) -> float:
    """Return the seconds of some passes if computes take no time."""
    return seconds(contender, replace(machine, area=0.0), parts)


def compute(contender: str, machine: Machine, parts: Sequence[Pass]) -> float:
    """Return the seconds of some passes without messages.

    In Ring, a rank computes P − 1 states in total for the ranks before and after it.
    """
    visitors = (machine.ranks - 1) * parts[0].making if contender == "Ring" else 0
    return len(parts) * machine.call + machine.area * (sum(part.area for part in parts) + visitors)


def _pass(contender: str, machine: Machine, part: Pass) -> float:
    making, within, finishing = (
        machine.area * area for area in (part.making, part.within, part.finishing)
    )
    moving = COMMUNICATION[contender](machine, part)
    if contender.startswith("LASP-2"):
        return machine.call + making + max(within, moving) + finishing
    if contender == "Ring" and machine.ranks > 1:
        hops = machine.ranks - 1
        first, others = max(making + within, moving / hops), (hops - 1) * max(making, moving / hops)
        return machine.call + first + others + making + finishing
    return machine.call + making + within + moving + finishing


def sent(contender: str, rank: int, ranks: int, part: Pass, backward: bool) -> int:
    """Return the bytes that a rank sends in a pass."""
    before = ranks - 1 - rank if backward else rank
    behind = ranks - 1 - before
    return {
        "LASP-2 all_gather": behind * part.state,
        "LASP-2 scan": part.state if behind else 0,
        "LASP-1": part.state if behind else 0,
        "Ring": (before + 1) * part.block if behind else 0,
        "data parallel": 0,
    }[contender]


def fit(samples: Sequence[tuple[str, Machine, Sequence[Pass], float, float]]) -> dict[str, float]:
    """Return the constants of a machine, by least squares of relative errors.

    A sample is a contender, its ranks and ports, its passes, seconds without communication, and
    seconds of communication without compute. Both times are linear in the constants.
    """
    names = ("call", "area", "latency", "byte")
    rows, times = [], []
    for contender, shape, parts, computing, moving in samples:
        for time, formula in ((computing, compute), (moving, communication)):
            units = [replace(shape, **(dict.fromkeys(names, 0.0) | {name: 1.0})) for name in names]
            rows.append([formula(contender, unit, parts) / time for unit in units])
            times.append(1.0)
    found = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)[0]
    return dict(zip(names, found.tolist(), strict=True))
