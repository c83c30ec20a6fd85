"""One rank of a sweep: it checks and times contenders and measures their costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqpar.bench.workers import links, memory, reference
from seqpar.bench.workers.ranks import Task
from seqpar.bench.workloads import contenders
from seqpar.bench.workloads.contenders import ONE, Contender
from seqpar.bench.workloads.masks import PackedBatch
from seqpar.bench.workloads.workloads import DTYPES, MAX_TOKENS_CHECKED, Workload
from seqpar.comm.messages.exchange import Comm
from seqpar.costs.profile import harness
from seqpar.strategies.registry import attention_modules

EXPOSURE_ROUNDS = 3
SPOT_CHECK_ROWS = 16  # per rank, where a batch is too large to compare all rows


@dataclass(frozen=True)
class MeasuredStep:
    """A contender's forward, or forward and backward, on this rank."""

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

    @property
    def operand_bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors[: 4 if self.backward else 3])


class Rank:
    """One rank of the group; it performs the driver's tasks and keeps a workload's steps."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._workload: Workload | None = None
        self._steps: dict[str, MeasuredStep] = {}
        self._expected_of: tuple[Workload, list[Tensor], reference.Sums] | None = None

    def answer(self, task: Task) -> object:
        if task["do"] == "links":
            return links.measure(self._comm, self._device)
        if task["do"] == "device":
            return links.place(self._device)
        workload, name = Workload(**task["workload"]), task["contender"]
        if workload != self._workload:
            self._workload, self._steps = workload, {}
            memory.release()
        if task["do"] == "check":
            return self._check(workload, name)
        step = self._step(workload, name)
        return self._seconds(step) if task["do"] == "time" else self._costs(step, name)

    def _contender(self, name: str, workload: Workload, batch: PackedBatch) -> Contender:
        heads = workload.heads, workload.kv_heads
        return contenders.make(name, self._comm, batch, *heads, self._device)

    def _make(self, workload: Workload, contender: Contender) -> MeasuredStep:
        """Return a step that shares tensors with a contender of equal tokens and heads."""
        indices = contender.indices.to(self._device)
        for other in self._steps.values():
            its_indices = other.contender.indices.to(self._device)
            if other.contender.heads == contender.heads and torch.equal(its_indices, indices):
                return MeasuredStep(contender, other.tensors, workload.backward)
        heads = contender.heads, contender.kv_heads, contender.kv_heads, contender.heads
        dim, dtype = workload.head_dim, DTYPES[workload.dtype]
        drawn = [reference.draw(i, indices, n, dim, dtype) for i, n in enumerate(heads)]
        return MeasuredStep(contender, tuple(drawn), workload.backward)

    def _step(self, workload: Workload, name: str) -> MeasuredStep:
        if name not in self._steps:
            batch = PackedBatch.of(workload.mask, workload.tokens)
            self._steps[name] = self._make(workload, self._contender(name, workload, batch))
        return self._steps[name]

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
        peak = memory.peak(step, self._device)
        nbytes = None if sent is None else sent() - before
        exposed = None
        if name in attention_modules() and self._comm.size > 1:
            exposed = harness.exposed(step, self._comm, EXPOSURE_ROUNDS)
        return {
            "memory": None if peak is None else peak + step.operand_bytes,
            "bytes": nbytes,
            "exposure": exposed,
        }

    def _check(self, workload: Workload, name: str) -> reference.CheckSums:
        small = self._small(workload)
        batch = PackedBatch.of(small.mask, small.tokens)
        contender = self._contender(name, workload, batch)
        parts = range(self._comm.rank, workload.kv_heads, self._comm.size)
        kv = torch.tensor([*parts], dtype=torch.int64, device=self._device)
        group = workload.heads // workload.kv_heads
        q = (kv[:, None] * group + torch.arange(group, device=self._device)).flatten()
        if name == ONE:  # compute the same heads of the same tokens as the other contenders
            contender = contenders.one_device(batch, len(q), len(kv))
        everything = torch.arange(batch.tokens, device=self._device)
        heads = workload.heads, workload.kv_heads, workload.kv_heads, workload.heads
        dtype = DTYPES[workload.dtype]
        whole = [
            reference.draw(i, everything, n, workload.head_dim, dtype) for i, n in enumerate(heads)
        ]
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
        errors = reference.sums(results or expected, expected)
        check: reference.CheckSums = {"eager": eager, "errors": errors}
        if workload.tokens > small.tokens and name != ONE:
            check["spot"] = self._spot(workload, name)
        return check

    @staticmethod
    def _small(workload: Workload) -> Workload:
        """Return a workload of the same kind that is small enough to compare all of it."""
        if workload.tokens <= MAX_TOKENS_CHECKED:
            return workload
        chunks = 2 * workload.ranks  # some libraries need that many equal chunks
        tokens = MAX_TOKENS_CHECKED // chunks * chunks + workload.tokens % chunks
        return replace(workload, tokens=tokens)

    def _expected(
        self, small: Workload, batch: PackedBatch, mine: list[Tensor]
    ) -> tuple[list[Tensor], reference.Sums]:
        """Return attention of this rank's heads in fp64, and the error sums of plain PyTorch."""
        if self._expected_of is None or self._expected_of[0] != small:
            exact, eager = (
                reference.attention(batch, q, k, v, dout if small.backward else None)
                for q, k, v, dout in ([x.double() for x in mine], mine)
            )
            self._expected_of = small, exact, reference.sums(eager, exact)
        return self._expected_of[1:]

    def _whole(self, x: Tensor, indices: Tensor, tokens: int) -> Tensor:
        """Return the rows of all ranks' tokens, in packed order."""
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

    def _spot(self, workload: Workload, name: str) -> dict[str, reference.Sums]:
        """Return the error sums of some rows of the workload's out, and of plain PyTorch."""
        step = self._step(workload, name)
        out = step()[0]
        local = len(out)
        spots = torch.linspace(
            0, local - 1, min(SPOT_CHECK_ROWS, local), device=self._device
        ).long()
        places = step.contender.indices.to(self._device)[spots]
        everything = torch.arange(workload.tokens, device=self._device)
        shape = workload.kv_heads, workload.head_dim, DTYPES[workload.dtype]
        k, v = (reference.draw(i, everything, *shape) for i in (reference.K, reference.V))
        batch, q = PackedBatch.of(workload.mask, workload.tokens), step.tensors[0][spots]
        exact = reference.attention(batch, q.double(), k, v, places=places)
        eager = reference.attention(batch, q, k, v, places=places)
        return {
            "errors": reference.sums([out[spots]], exact),
            "eager": reference.sums(eager, exact),
        }
