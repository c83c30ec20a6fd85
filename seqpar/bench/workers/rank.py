"""One rank of a sweep, which checks the results of contenders, times their steps and measures their
costs. A *contender* is a strategy, another library, or the kernel on one device.

`ranks.py` starts this file as a process: `-m seqpar.bench.workers.rank`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from seqpar.bench.workers import links, oracle
from seqpar.bench.workers.ranks import RankRequest
from seqpar.bench.workloads import contenders
from seqpar.bench.workloads.contenders import ONE, Contender
from seqpar.bench.workloads.sweep_batches import PackedBatch
from seqpar.bench.workloads.workloads import MAX_TOKENS_CHECKED, Workload
from seqpar.comm.launch import connect, join
from seqpar.comm.messages.comm import Comm
from seqpar.core.options import DTYPES
from seqpar.costs.profile import harness
from seqpar.strategies.registry import attention_modules

EXPOSURE_ROUNDS = 3
SPOT_CHECK_ROWS = 16  # rows per rank that are compared if a batch has too many rows
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class MeasuredStep:
    """The forward, or the forward and backward, of a strategy or library on this rank."""

    contender: Contender
    tensors: tuple[Tensor, ...]  # q, k, v and dout
    backward: bool

    def __call__(self) -> list[Tensor]:
        *inputs, dout = (x.detach() for x in self.tensors)
        leaves = [x.requires_grad_(self.backward) for x in inputs]
        with self.contender.context():
            out = self.contender.attend(*leaves)
            gradients = torch.autograd.grad(out, leaves, dout) if self.backward else ()
        return [out.detach(), *gradients]


class Rank:
    """One rank of the group. It answers requests, and keeps the steps of a workload."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._workload: Workload | None = None
        self._steps: dict[str, MeasuredStep] = {}
        self._expected_of: tuple[Workload, list[Tensor], oracle.Sums] | None = None

    def answer(self, request: RankRequest) -> object:
        if request["do"] == "links":
            return links.measure(self._comm, self._device)
        if request["do"] == "device":
            return links.place(self._device)
        workload, name = Workload(**request["workload"]), request["contender"]
        if workload != self._workload:
            self._workload, self._steps = workload, {}
            release_memory()
        if request["do"] == "check":
            return self._check(workload, name)
        step = self._step(workload, name)
        return self._seconds(step) if request["do"] == "time" else self._costs(step, name)

    def _contender(self, name: str, workload: Workload, batch: PackedBatch) -> Contender:
        heads = workload.heads, workload.kv_heads
        return contenders.make(name, self._comm, batch, *heads, self._device)

    def _step(self, workload: Workload, name: str) -> MeasuredStep:
        """Return the step of the strategy or library `name`. Steps with the same tokens and heads
        share their tensors.
        """
        if name not in self._steps:
            batch = PackedBatch.of(workload.mask, workload.tokens)
            contender = self._contender(name, workload, batch)
            tensors = self._tensors(workload, contender)
            self._steps[name] = MeasuredStep(contender, tensors, workload.backward)
        return self._steps[name]

    def _tensors(self, workload: Workload, contender: Contender) -> tuple[Tensor, ...]:
        for other in self._steps.values():
            same_heads = other.contender.heads == contender.heads
            if same_heads and torch.equal(other.contender.indices, contender.indices):
                return other.tensors
        indices = contender.indices.to(self._device)
        return _operands(workload, indices, contender.heads, contender.kv_heads)

    def _together(self) -> None:
        self._comm.synchronize()
        self._comm.all_gather(torch.zeros(1, device=self._comm.device), label="sweep")
        self._comm.synchronize()

    def _seconds(self, step: Callable[[], object]) -> float:
        self._together()
        start = time.perf_counter()
        step()
        self._comm.synchronize()
        return time.perf_counter() - start

    def _costs(self, step: MeasuredStep, name: str) -> dict[str, object]:
        sent = step.contender.sent_bytes
        step()  # the first step also creates lasting objects, such as connections
        self._together()
        before = 0 if sent is None else sent()
        peak = peak_memory(step, self._device)
        operands = sum(x.nbytes for x in step.tensors[: 4 if step.backward else 3])
        nbytes = None if sent is None else sent() - before
        exposed = None
        if name in attention_modules() and self._comm.size > 1:
            exposed = harness.exposed(step, self._comm, EXPOSURE_ROUNDS)
        return {
            "memory": None if peak is None else peak + operands,
            "bytes": nbytes,
            "exposure": exposed,
        }

    def _check(self, workload: Workload, name: str) -> oracle.CheckSums:
        small = self._small(workload)
        batch = PackedBatch.of(small.mask, small.tokens)
        contender = self._contender(name, workload, batch)
        parts = range(self._comm.rank, workload.kv_heads, self._comm.size)
        kv = torch.tensor([*parts], dtype=torch.int64, device=self._device)
        group = workload.heads // workload.kv_heads
        q = (kv[:, None] * group + torch.arange(group, device=self._device)).flatten()
        if name == ONE:  # on all ranks together, the heads and tokens that other contenders compute
            contender = contenders.one_device(batch, len(q), len(kv))
        everything = torch.arange(batch.tokens, device=self._device)
        whole = _operands(workload, everything, workload.heads, workload.kv_heads)
        mine = [x[:, own] for x, own in zip(whole, (q, kv, kv, q), strict=True)]
        results: list[Tensor] = []
        if name != ONE:
            indices = contender.indices.to(self._device)
            local = MeasuredStep(contender, tuple(x[indices] for x in whole), workload.backward)()
            gathered = [self._whole(x, indices, batch.tokens) for x in local]
            results = [x[:, own] for x, own in zip(gathered, (q, q, kv, kv), strict=False)]
        elif len(kv):
            results = MeasuredStep(contender, tuple(mine), workload.backward)()
        expected, eager = self._expected(small, batch, mine)
        errors = oracle.sums(results or expected, expected)
        check: oracle.CheckSums = {"eager": eager, "errors": errors}
        if workload.tokens > small.tokens and name != ONE:
            check["spot"] = self._spot(workload, name)
        return check

    @staticmethod
    def _small(workload: Workload) -> Workload:
        """Return a workload of the same kind that is small enough to compare all results."""
        if workload.tokens <= MAX_TOKENS_CHECKED:
            return workload
        # Some libraries require that tokens can be cut into this number of equal chunks.
        chunks = 2 * workload.ranks
        tokens = MAX_TOKENS_CHECKED // chunks * chunks + workload.tokens % chunks
        return replace(workload, tokens=tokens)

    def _expected(
        self, small: Workload, batch: PackedBatch, mine: list[Tensor]
    ) -> tuple[list[Tensor], oracle.Sums]:
        """Return fp64 attention of this rank's heads, and the sums of errors of plain PyTorch."""
        if self._expected_of is None or self._expected_of[0] != small:
            exact, eager = (
                oracle.attention(batch, q, k, v, dout if small.backward else None)
                for q, k, v, dout in ([x.double() for x in mine], mine)
            )
            self._expected_of = small, exact, oracle.sums(eager, exact)
        return self._expected_of[1:]

    def _whole(self, x: Tensor, indices: Tensor, tokens: int) -> Tensor:
        """Gather the rows of a tensor from all ranks, in the order of the packed batch."""
        gathered = {}
        counts = self._comm.all_gather(torch.tensor([len(x)], device=x.device), label="sweep")
        longest = max(map(int, counts))
        for name, part in (("x", x), ("indices", indices)):
            padded = part.new_zeros(longest, *part.shape[1:])
            padded[: len(part)] = part
            gathered[name] = self._comm.all_gather(padded, label="sweep")
        result = x.new_zeros(tokens, *x.shape[1:])
        for count, part, places in zip(counts, gathered["x"], gathered["indices"], strict=True):
            result[places[: int(count)]] = part[: int(count)]
        return result

    def _spot(self, workload: Workload, name: str) -> dict[str, oracle.Sums]:
        """Return the sums of errors of some rows of `out`, for the strategy or library `name` and
        for plain PyTorch.
        """
        step = self._step(workload, name)
        out = step()[0]
        count = min(SPOT_CHECK_ROWS, len(out))
        spots = torch.linspace(0, len(out) - 1, count, device=self._device).long()
        places = step.contender.indices.to(self._device)[spots]
        everything = torch.arange(workload.tokens, device=self._device)
        shape = workload.kv_heads, workload.head_dim, DTYPES[workload.dtype]
        k, v = (oracle.draw(i, everything, *shape) for i in (oracle.K, oracle.V))
        batch, q = PackedBatch.of(workload.mask, workload.tokens), step.tensors[0][spots]
        exact = oracle.attention(batch, q.double(), k, v, places=places)
        eager = oracle.attention(batch, q, k, v, places=places)
        errors = oracle.sums([out[spots]], exact)
        return {"errors": errors, "eager": oracle.sums(eager, exact)}


def _operands(workload: Workload, indices: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    shape = workload.head_dim, DTYPES[workload.dtype]
    counts = heads, kv_heads, kv_heads, heads
    return tuple(oracle.draw(i, indices, n, *shape) for i, n in enumerate(counts))


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # this C library does not have malloc_trim
        return


def peak_memory(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the number of bytes by which a step raises the peak memory. The step's results are
    included.

    On a CPU, the number comes from Linux, with an error of about 100 KiB. Returns None on a CPU
    without Linux.
    """
    release_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = step()
        del kept
        return torch.cuda.max_memory_allocated() - before
    try:
        _CLEAR.write_text("5")  # resets the peak
        resident = _kilobytes("VmRSS")
        kept = step()
        del kept
        return max(0, _kilobytes("VmHWM") - resident) * 1024
    except (OSError, KeyError):
        return None


def _kilobytes(name: str) -> int:
    lines = (line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(dict(lines)[name].split()[0])


def serve(host: str, port: int, name: str, rank: int, size: int, device: torch.device) -> None:
    store = connect(host, port)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    measuring = Rank(join(store, f"{name}/group", rank, size, device), device)
    store.set(f"{name}/ready/{rank}", "")
    number = 0
    while True:
        request = json.loads(store.get(f"{name}/request/{number}"))
        answer = answer_to(measuring, request)
        if "failed" in answer:
            store.set(f"{name}/failed/{number}", "")
        store.set(f"{name}/answer/{number}/{rank}", json.dumps(answer))
        number += 1


def answer_to(measuring: Rank, request: RankRequest) -> dict[str, object]:
    """Return the answer to a request, or why it failed and whether the rank can continue."""
    try:
        return {"value": measuring.answer(request)}
    except ValueError as error:
        return {"failed": f"refused: {error}", "refused": True}
    except torch.OutOfMemoryError as error:
        return {"failed": f"out of memory: {error}".splitlines()[0]}
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        out_of_memory = "allocate memory" in first  # in the message of torch's CPU allocator
        prefix = "out of memory: " if out_of_memory else ""
        return {"failed": f"{prefix}{type(error).__name__}: {first[:500]}"}


def main() -> None:
    host, port, name, rank, size, device, parent = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles the signal and ends its ranks
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # the parent had died before prctl was called
    serve(host, int(port), name, int(rank), int(size), torch.device(device))


if __name__ == "__main__":
    main()
