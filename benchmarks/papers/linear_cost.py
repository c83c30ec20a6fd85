"""A cost model of linear attention across ranks.

It gives the time of a layer, forward and backward, from a machine's constants. Each pass makes the
states of a rank's tokens, does the work within its spans, and finishes with what entered. Between
them

    LASP-2 all_gather   hides under the work within spans:
                        α + (states that leave the busiest rank) · S / β
    LASP-2 collective   hides likewise: Σ hops α + the more of what enters a rank and a rank's share
                        of what enters its node, where each state enters a node once
    LASP-2 scan         hides likewise, in K blocks:
                        Σ hops (α + S/Kβ) + (K − 1) · the slowest hop
    LASP-1              waits for Σ hops (α + S/β)
    Ring                hides under the making of states:
                        h = α + (keys and values, or q and dout) / β, P − 1 times

with P − 1 hops of neighbours. A link that was idle takes its burst at once: that many bytes of a
message, or of the first of a run of them, cost nothing. A hop within a node has its own α and β.
The library sends messages; the collective, NCCL's AllGather, is what the LASP-2 paper measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from seqpar.core.hooks import hooks
from seqpar.linear.spans import SpanStates
from seqpar.linear.states.attend import LinearOptions, begin_backward, begin_forward

BLOCKS = 4  # of LASP2Attention


@dataclass(frozen=True)
class Pass:
    """What a rank does and what may travel: areas as traces count them, and bytes."""

    making: int
    within: int
    finishing: int
    state: int  # bytes of a rank's state
    block: int  # bytes of its keys and values, or of q and dout

    @property
    def area(self) -> int:
        return self.making + self.within + self.finishing


def passes(tokens: int, heads: int, dim: int, itemsize: int = 2) -> list[Pass]:
    """Return forward and backward with so many tokens a rank."""
    x = torch.empty(1, tokens, heads, dim, device="meta")
    spans, options = (
        SpanStates(np.array([0, tokens]), np.array([-1]), np.array([-1])),
        LinearOptions(1.0, True, "aten", None),
    )
    areas: list[int] = []
    with hooks.set(replace_compute=areas.append):
        for work in (
            lambda: begin_forward(x, x, x, spans, options),
            lambda: begin_backward(x, x, x, x, spans, options, None),
        ):
            begun: Any = work()
            begun.local()
            begun.finish(None)
    moved = heads * dim * dim * 4, 2 * tokens * heads * dim * itemsize
    return [Pass(*areas[:3], *moved), Pass(*areas[3:], *moved)]


@dataclass(frozen=True)
class Machine:
    """Seconds of each thing.

    A rank reaches `ports` others at once at full rate (0: all), those of its node beside them.
    """

    ranks: int
    area: float  # of a unit of area
    latency: float  # of a message
    byte: float  # of a byte on a link
    call: float = 0.0  # of a pass, whatever it does
    ports: int = 0
    node: int = 1  # ranks, of which neighbours have links of their own:
    inner_latency: float = 0.0
    inner_byte: float = 0.0
    burst: int = 0  # bytes

    def hops(self, size: float) -> list[float]:
        """Return the seconds of a message to each next rank, on links that are busy."""
        within, across = (
            self.inner_latency + size * self.inner_byte,
            self.latency + size * self.byte,
        )
        return [across if rank % self.node == 0 else within for rank in range(1, self.ranks)]

    def saved(self, size: float) -> float:
        """Return what the burst of a link saves on which a message begins."""
        return min(size, self.burst) * self.byte

    def fan(self, size: int) -> float:
        """Return the seconds of a message from one rank to each other."""
        near, far = self.node - 1, self.ranks - self.node
        queue = -(-far // (self.ports or far or 1)) * size
        across = self.latency + queue * self.byte - self.saved(queue) if far else 0.0
        return max(across, self.inner_latency + near * size * self.inner_byte)


def gathered(machine: Machine, part: Pass) -> float:
    """Return the seconds that states sent to each rank take."""
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
    """Return the same where computes take no time."""
    return seconds(contender, replace(machine, area=0.0), parts)


def compute(contender: str, machine: Machine, parts: Sequence[Pass]) -> float:
    """Return the same where nothing is sent.

    What a rank of Ring does for those before it and behind it is P − 1 states in all.
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
    seconds of communication alone. In both of these, times are sums of the constants, each so many
    times.
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
