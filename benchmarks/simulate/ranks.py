"""The code that ranks run with data, and that simulation records without data."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from benchmarks import harness
from seqpar import Layout
from seqpar.comm.messages.exchange import Comm
from seqpar.core.hooks import hooks

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
        """Return the layout."""
        edges = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        return getattr(Layout, self.layout)(edges, self.ranks)


@functools.cache
def module(strategy: str) -> nn.Module:
    """Return a strategy's module on all ranks of this process's group."""
    return seqpar.make_attention(strategy, dist.group.WORLD)


def step(cell: Cell, attn: nn.Module, rank: int, device: str) -> Callable[[], list[Tensor]]:
    """Return a rank's step, which returns out and the gradients of q, k and v."""
    layout, shape = cell.made(), (sum(cell.lengths), cell.heads, DIM)
    if device == "meta":
        local = layout.tokens_on(rank), *shape[1:]
        leaves = [torch.empty(local, device="meta") for _ in range(4)]
    else:
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(4, *shape, generator=generator).unbind()
        leaves = [layout.shard(x, rank, dim=0).contiguous() for x in whole]
    *operands, dout = leaves
    operands = [x.requires_grad_() for x in operands]

    def run() -> list[Tensor]:
        out = attn(*operands, layout, causal=True)
        return [out, *torch.autograd.grad(out, operands, dout)]

    return run


def code(cell: Cell) -> Callable[[Comm], object]:
    """Return the function for `simulate.record`."""

    def run(comm: Comm) -> None:
        step(cell, seqpar.make_attention(cell.strategy, comm), comm.rank, "meta")()

    return run


def error(cell: Cell) -> float:
    """Return the largest RMS error of this rank's results, over the RMS of the expected results."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, sum(cell.lengths), cell.heads, DIM, generator=generator).double()
    *leaves, dout = (x.requires_grad_() for x in whole.unbind())
    parts = zip(*(x.transpose(0, 1).split(list(cell.lengths), 1) for x in leaves), strict=True)
    out = torch.cat([F.scaled_dot_product_attention(*x, is_causal=True) for x in parts], 1)
    out = out.transpose(0, 1)
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    layout, rank = cell.made(), dist.get_rank()
    found = step(cell, module(cell.strategy), rank, "cpu")()
    return harness.worst_error(found, [layout.shard(x, rank, dim=0) for x in expected])


def seconds(cell: Cell, rounds: int) -> list[float]:
    """Return this rank's seconds from a barrier to the end of a step, per round."""
    torch.set_num_threads(1)
    run, times = step(cell, module(cell.strategy), dist.get_rank(), "cpu"), []
    sleeping: AbstractContextManager[None] = nullcontext()
    if cell.pair_seconds:
        sleeping = hooks.set(replace_compute=lambda area: time.sleep(area * cell.pair_seconds))
    with sleeping:
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return times[1:]


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
