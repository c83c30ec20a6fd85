"""The time of all ranks' attention kernels, which one device computes rank by rank.

Ranks are virtual: they run one after another on one device and receive noise instead of messages.
The attention kernels of every step are timed by the device's clock. The efficiency is one device's
time for the whole sequence over the sum of the ranks' times; the loss comes from smaller tiles,
continued partials, and merging. `virtual_ranks.py` is the program.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.device import DEVICE, GPU, HEAD_START
from seqpar import Layout, USPAttention, make_attention
from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Message
from seqpar.core.hooks import Moment, TracedWork, set_hooks
from seqpar.softmax.call import Operands

BACKEND = "triton" if GPU else "aten"
PASSES = ("forward", "backward")


class Sizes(NamedTuple):
    """The size of the computation: total tokens, query and KV heads, head dim, and ranks."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    ranks: int


class Alone(Comm):
    """One rank without its peers: it immediately receives noise."""

    names = itertools.count()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(f"alone{next(self.names)}", rank, size)

    def start(self, sends: list[Message], recvs: list[Message], exchange: object) -> Pending:
        for _, x in recvs:
            if x.dtype == torch.uint8:
                x.random_(56, 64)  # the bytes of a small, finite number in any float dtype
            else:
                x.normal_()
        return Pending([], [])


class Clock:
    """A `Recorder` that sums the time of attention kernels."""

    def __init__(self) -> None:
        self._moments: list[tuple[Moment, Moment]] = []

    def begin(self, label: str, rank: int) -> None:
        """Ignore the beginning of a call."""

    def compute(self, start: Moment, stop: Moment, work: TracedWork) -> None:
        """Record a computation."""
        self._moments.append((start, stop))

    def exchange(self, *_: Any) -> Any:
        """Ignore an exchange. Returns a maker of contexts for its wait."""
        return nullcontext

    def seconds(self) -> float:
        """Return the sum after the device has finished."""
        if GPU:
            torch.cuda.synchronize()
        return sum(
            stop - start
            if isinstance(start, float) and isinstance(stop, float)
            else start.elapsed_time(stop) / 1e3  # type: ignore[union-attr,arg-type]
            for start, stop in self._moments
        )


class Rank:
    """One rank's operands and passes."""

    def __init__(self, strategy: str, layout: Layout, rank: int, sizes: Sizes) -> None:
        comm = Alone(rank, layout.ranks)
        if strategy == "usp":
            comm.shape = (2, layout.ranks // 2)
        self._attention: Any = (
            USPAttention(comm) if strategy == "usp" else make_attention(strategy, comm)
        )
        n = layout.token_indices(rank).numel()
        self._q, self._k, self._v, self._dout = (
            torch.randn(
                1, n, heads, sizes.dim, device=DEVICE, dtype=torch.bfloat16 if GPU else None
            )
            for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
        )
        self._layout = layout

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of one call's kernels, forward and backward."""
        q, k, v = self._q, self._k, self._v
        strategy, comm = self._attention._bound.strategy, self._attention._bound.comm.call()
        call = self._attention._resolve(q, k, v, self._layout, causal=True)
        operands, out, lse, residuals = Operands(q, k, v), None, None, None

        def forward() -> None:
            nonlocal out, lse, residuals
            out, lse, residuals = strategy.forward(comm, call, operands)

        took = timed(forward)
        kept = residuals or [q, k, v, out, lse]
        return took, timed(lambda: strategy.backward(comm, call, self._dout, None, None, kept))


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of the attention kernels in a call, without the host's time."""
    clock = Clock()
    if GPU:
        torch.cuda._sleep(10 * HEAD_START)
    with torch.no_grad(), set_hooks(traces=(clock,)):
        function()
    return clock.seconds()


def median(rank: Callable[[], Rank], rounds: int) -> tuple[float, ...]:
    """Return the medians of a rank's passes, after one call to compile."""
    made = rank()
    made.seconds()
    return tuple(map(statistics.median, zip(*[made.seconds() for _ in range(rounds)], strict=True)))


def measure(
    strategy: str, kind: str, edges: list[int], sizes: Sizes, rounds: int
) -> dict[str, Any]:
    """Return the seconds of one device and of each rank, by pass, and the efficiencies."""
    layout, whole = getattr(Layout, kind)(edges, sizes.ranks), Layout.contiguous(edges, 1)
    one = median(lambda: Rank("ring", whole, 0, sizes), rounds)
    ranks = [
        median(lambda rank=rank: Rank(strategy, layout, rank, sizes), rounds)  # type: ignore[misc]
        for rank in range(sizes.ranks)
    ]
    found: dict[str, Any] = {"one": one, "ranks": ranks}
    for i, direction in enumerate(PASSES):
        took = [rank[i] for rank in ranks]
        found[direction] = {
            "efficiency": one[i] / sum(took),
            "slowest": sizes.ranks * max(took) / sum(took),
        }
    return found
