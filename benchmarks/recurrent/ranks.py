"""Compare recurrent attention on this machine's ranks with one process.

    python -m benchmarks.recurrent.ranks

2 ranks × 1 thread against one process × 2 threads of the same module and backend, one document.
Both run in separate processes, and rounds interleave them; the figure is the ratio of medians.
Results are first compared with one process in fp64.
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.network.emulated import Network
from benchmarks.recurrent.kernels import LIMIT, inputs_of
from seqpar import Layout, RecurrentAttention
from seqpar.linear.kinds import KINDS

RANKS, NAMES = 2, ("q", "k", "v", "log_decay", "beta")
PASSES = {False: "forward", True: "forward+backward"}
LAYOUTS = {"all_gather": Layout.zigzag, "scan": Layout.contiguous, "tree": Layout.contiguous}
Shape = tuple[int, int, int]  # tokens of all ranks, heads, and their size
Row = dict[str, Any]


class Call:
    """A kind's call on the ranks of this process's group."""

    def __init__(self, kind: str, transport: str, shape: Shape) -> None:
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.set_num_threads(RANKS // ranks)  # one process uses as many cores as the ranks
        self._layout = LAYOUTS[transport](shape[0], ranks)
        self._attend = RecurrentAttention(dist.group.WORLD, kind, transport)
        inputs, self._dout = inputs_of(kind, *shape)
        self._inputs = {n: x for n, x in zip(NAMES, inputs, strict=True) if x is not None}
        self.index = self._layout.token_indices(self._rank)
        self._scale = shape[2] ** -0.5

    def prepare(self, backward: bool, exact: bool = False) -> Any:
        """Return a function that makes the call: out, and with `backward` gradients."""
        dtype = torch.float64 if exact else torch.float32
        leaves = {}
        for name, x in self._inputs.items():
            mine = x if x.dim() == 1 else self._layout.shard(x, self._rank, 1)
            leaves[name] = mine.to(dtype).requires_grad_(backward and x.dim() > 1)
        dout = self._layout.shard(self._dout, self._rank, 1).to(dtype)
        wanted = [x for x in leaves.values() if x.requires_grad]

        def call() -> list[Tensor]:
            out = self._attend(**leaves, layout=self._layout, scale=self._scale)
            gradients = torch.autograd.grad(out, wanted, dout) if backward else ()
            return [out.detach(), *gradients]

        return call


def results(kind: str, transport: str, shape: Shape, exact: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the indices of this rank's tokens, and its out and gradients."""
    call = Call(kind, transport, shape)
    return call.index, call.prepare(True, exact)()


def seconds(kind: str, transport: str, shape: Shape, backward: bool) -> float:
    call = Call(kind, transport, shape).prepare(backward)
    time.sleep(0.05)  # threads of the previous contender may still spin
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def checked(one: Network, ranks: Network, kind: str, transport: str, shape: Shape) -> Row:
    """Return the largest RMS errors over the RMS of one process's results in fp64."""
    ((_, exact),) = one(results, kind, transport, shape, True)
    errors = {}
    for name, network in (("alone", one), ("ranks", ranks)):
        whole = [torch.empty_like(x) for x in exact]
        for index, parts in network(results, kind, transport, shape, False):
            for total, x in zip(whole, parts, strict=True):
                total[:, index] = x.double()
        errors[name] = harness.worst_error(whole, exact)
    harness.check_error(f"{kind}, {transport}", max(errors.values()), LIMIT)
    return errors


def compared(
    one: Network, ranks: Network, kind: str, transport: str, shape: Shape, rounds: int
) -> list[Row]:
    """Return a row for each pass: raw seconds, and the speed of one process over that of ranks."""
    errors, networks = checked(one, ranks, kind, transport, shape), {"alone": one, "ranks": ranks}
    rows = []
    for backward, passes in PASSES.items():
        samples: dict[str, list[float]] = {name: [] for name in networks}
        for _, name in harness.turns(networks, rounds):
            found = networks[name](seconds, kind, transport, shape, backward)
            samples[name].append(max(found))
        medians = {name: statistics.median(each) for name, each in samples.items()}
        row = {"kind": kind, "transport": transport, "shape": shape, "pass": passes}
        ratio = medians["alone"] / medians["ranks"]
        rows.append(row | {"seconds": samples, "errors": errors, "speed": ratio})
        print(f"{kind:14} {transport:10} {passes:16} {ratio:.2f} of one process", flush=True)
    return rows


def measure(options: Namespace) -> dict[str, Any]:
    shape = options.tokens, options.heads, options.dim
    with (
        Network("loopback", 1, timeout=600) as one,
        Network("loopback", RANKS, timeout=600) as ranks,
    ):
        rows = [
            row
            for kind, transport in itertools.product(options.kinds, options.transports)
            for row in compared(one, ranks, kind, transport, shape, options.rounds)
        ]
    return {"rows": rows}


ARGUMENTS = {
    "--kinds": (sorted(KINDS), None, sorted(KINDS)),
    "--transports": (["all_gather"], None, sorted(LAYOUTS)),
    "--tokens": 4096,
    "--heads": 4,
    "--dim": 64,
    "--rounds": 9,
}

if __name__ == "__main__":
    harness.run("recurrent-ranks", __doc__, ARGUMENTS, measure)
