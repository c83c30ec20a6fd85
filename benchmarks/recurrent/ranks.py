"""Compare recurrent attention on this machine's ranks with one process.

    python -m benchmarks.recurrent.ranks

2 ranks × 1 thread against one process × 2 threads of the same module and backend, one document.
Both run in separate processes, and rounds interleave them; the figure is the ratio of medians.
Results are first compared with one process in fp64. If the machine was unsteady, a run writes no
results: run it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import RESULTS, harness
from benchmarks.recurrent.kernels import LIMIT, inputs_of
from seqpar import Layout, RecurrentAttention
from seqpar.comm.messages.exchange import Comm
from seqpar.linear.kinds import KINDS

RANKS, NAMES = 2, ("q", "k", "v", "log_decay", "beta")
PASSES = {False: "forward", True: "forward+backward"}
LAYOUTS = {"all_gather": Layout.zigzag, "scan": Layout.contiguous, "tree": Layout.contiguous}


class Call:
    """A kind's call on a rank, or with rank −1 in one process."""

    def __init__(self, rank: int, kind: str, transport: str, shape: tuple[int, int, int]) -> None:
        group: Any = Comm("alone", 0, 1) if rank < 0 else dist.group.WORLD
        self._layout = LAYOUTS[transport](shape[0], 1 if rank < 0 else RANKS)
        self._rank = max(rank, 0)
        self._attend = RecurrentAttention(group, kind, transport)
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


def serve(rank: int, threads: int, store: str, pipe: Connection) -> None:
    """Run a process that checks and times on request."""
    torch.set_num_threads(threads)
    if rank >= 0:
        where = dist.FileStore(store, RANKS)
        dist.init_process_group("gloo", store=where, rank=rank, world_size=RANKS)
    while (task := pipe.recv()) is not None:
        if task == "canary":
            pipe.send(harness.canary())
            continue
        kind, transport, shape, backward, check = task
        made = Call(rank, kind, transport, shape)
        if check is not None:
            pipe.send((made.index, made.prepare(True, exact=check)()))
            continue
        call = made.prepare(backward)
        if rank >= 0:
            dist.barrier()
        start = time.perf_counter()
        call()
        pipe.send(time.perf_counter() - start)


class Contenders:
    """One process, and the ranks."""

    def __init__(self, folder: str) -> None:
        context, self._pipes, self._processes = multiprocessing.get_context("spawn"), [], []
        for rank, threads in ((-1, RANKS), *((rank, 1) for rank in range(RANKS))):
            ours, theirs = context.Pipe()
            arguments = (rank, threads, f"{folder}/store", theirs)
            self._processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self._processes[-1].start()
            self._pipes.append(ours)

    def ask(self, alone: bool, task: Any) -> list[Any]:
        """Return the answers of the single process, or of the ranks."""
        asked = self._pipes[:1] if alone else self._pipes[1:]
        for pipe in asked:
            pipe.send(task)
        return [pipe.recv() for pipe in asked]

    def error(self, alone: bool, *call: Any) -> float:
        """Return the largest RMS error over the RMS of one process's results in fp64."""
        _, exact = self.ask(True, (*call, True, True))[0]
        whole = [torch.empty_like(x) for x in exact]
        for index, parts in self.ask(alone, (*call, True, False)):
            for total, x in zip(whole, parts, strict=True):
                total[:, index] = x.double()
        return harness.worst_error(whole, exact)

    def end(self) -> None:
        """End all processes, which write into the folder until then."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def measure(
    contenders: Contenders, kind: str, transport: str, shape: tuple[int, int, int], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each pass: raw seconds, and the speed of one process over that of ranks."""
    call = kind, transport, shape
    errors = {name: contenders.error(name == "alone", *call) for name in ("alone", "ranks")}
    if not max(errors.values()) <= LIMIT:
        raise SystemExit(f"{kind}, {transport} has wrong results: {errors}; no times were measured")
    rows = []
    for backward, passes in PASSES.items():
        seconds: dict[str, list[float]] = {"alone": [], "ranks": []}
        for i in range(rounds):
            for name in ("alone", "ranks") if i % 2 else ("ranks", "alone"):
                time.sleep(0.05)  # threads of the previous contender may still spin
                found = contenders.ask(name == "alone", (*call, backward, None))
                seconds[name].append(max(found))
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        row = {"kind": kind, "transport": transport, "shape": shape, "pass": passes}
        ratio = medians["alone"] / medians["ranks"]
        rows.append(row | {"seconds": seconds, "errors": errors, "speed": ratio})
        print(f"{kind:14} {transport:10} {passes:16} {ratio:.2f} of one process", flush=True)
    return rows


def main() -> int:
    """Check and time all kinds, print ratios, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--transports", nargs="*", choices=sorted(LAYOUTS), default=["all_gather"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true", help="only print: write no result file")
    options = parser.parse_args()
    shape = options.tokens, options.heads, options.dim
    with tempfile.TemporaryDirectory() as folder:
        contenders = Contenders(folder)
        before = contenders.ask(True, "canary")[0]
        rows = [
            row
            for kind in options.kinds
            for transport in options.transports
            for row in measure(contenders, kind, transport, shape, options.rounds)
        ]
        after = contenders.ask(True, "canary")[0]
        contenders.end()
    if not options.no_write:
        found = {"rows": rows, "canary": harness.check_canary(before, after)}
        harness.write(RESULTS, "recurrent-ranks", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
