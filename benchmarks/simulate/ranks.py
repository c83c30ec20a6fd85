"""The code that ranks run with data, and that simulation records without data."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import seqpar
from benchmarks.steps import Step, module
from seqpar import Layout
from seqpar.comm.messages.comm import Comm

DIM = 64
_BEYOND_CACHES = 2**26  # bytes
_BESIDE = 2**15  # bytes of a message during which a rank computes a small call of attention


class Cell(NamedTuple):
    """A step: causal attention in fp32, forward and backward.

    Attributes:
        where: "cores", or on emulated "links".
        ranks: the number of ranks.
        strategy: its name.
        layout: the name of the `Layout` method.
        lengths: of the documents.
        heads: of queries, keys and values.
        pair_seconds: sleep per pair and head instead of computing; 0: compute.
    """

    where: str
    ranks: int
    strategy: str
    layout: str
    lengths: tuple[int, ...]
    heads: int
    pair_seconds: float = 0.0

    def made(self) -> Layout:
        edges = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        return getattr(Layout, self.layout)(edges, self.ranks)


def code(cell: Cell) -> Callable[[Comm], object]:
    """Return the function for `simulate.record`: a rank's step, without data."""
    layout = cell.made()

    def run(comm: Comm) -> None:
        shape = layout.tokens_on(comm.rank), cell.heads, DIM
        *leaves, dout = (torch.empty(shape, device="meta") for _ in range(4))
        operands = [x.requires_grad_() for x in leaves]
        out = seqpar.make_attention(cell.strategy, comm)(*operands, layout, causal=True)
        torch.autograd.grad(out, operands, dout)

    return run


def error(cell: Cell) -> float:
    """Return the largest RMS error of this rank's results, over the RMS of the expected results."""
    return Step(cell.made(), cell.heads, DIM).error(module(cell.strategy))


def seconds(cell: Cell, rounds: int) -> list[float]:
    """Return this rank's seconds from a barrier to the end of a step, per round."""
    torch.set_num_threads(1)
    step = Step(cell.made(), cell.heads, DIM)
    return step.times(module(cell.strategy), rounds, cell.pair_seconds)


def exchanges(
    sizes: Sequence[int], rounds: int, peers: int = 1, computing: bool = False
) -> list[float]:
    """Return the median seconds of messages of each size, one to each of the next `peers` ranks.

    As in a step, messages are not in a cache, because they follow one another in memory. With
    `computing`, ranks compute until their messages have arrived, and the time is the CPU time to
    send one message and receive another. Otherwise it is the wall-clock time of each simultaneous
    message.
    """
    torch.set_num_threads(1)
    comm, found = Comm.of(dist.group.WORLD), []
    ways = range(1, peers + 1)
    memory = torch.zeros(2, max(_BEYOND_CACHES, *sizes) // 4)
    operands = torch.randn(3, 1, 4, 256, DIM).unbind()
    for size in sizes:
        parts = [itertools.cycle(x.split(size // 4)) for x in memory]
        times = []
        for _ in range(rounds + 1):
            sends, recvs = (
                [((comm.rank + sign * way) % comm.size, next(part)) for way in ways]
                for sign, part in zip((1, -1), parts, strict=True)
            )
            dist.barrier()
            cores, start, apart = time.process_time(), time.perf_counter(), 0.0
            pending = comm.exchange(sends, recvs, label="exchange")
            if computing:
                apart -= time.thread_time()
                for _ in range(1 + size // _BESIDE):
                    F.scaled_dot_product_attention(*operands, is_causal=True)
                apart += time.thread_time()
            pending.wait()
            taken = time.process_time() - cores - apart
            times.append((taken if computing else time.perf_counter() - start) / peers)
        found.append(statistics.median(times[1:]))
    return found
