"""What a rank does for a sweep: check, time and weigh steps of contenders, and say so in JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.bench.workers import links, memory, operands, reference
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
    """A forward, or forward and backward, of a contender on this rank.

    Attributes:
        tensors: q, k, v and dout.
    """

    contender: Contender
    tensors: tuple[Tensor, ...]
    backward: bool

    def __call__(self) -> list[Tensor]:
        """Return out, and the gradients of q, k and v."""
        *inputs, dout = (x.detach() for x in self.tensors)
        leaves = [x.requires_grad_(self.backward) for x in inputs]
        with self.contender.context():
            out = self.contender.attend(*leaves)
            gradients = torch.autograd.grad(out, leaves, dout) if self.backward else ()
        return [out.detach(), *gradients]

    @property
    def operand_bytes(self) -> int:
        """The bytes of q, k and v, and of dout where it is used."""
        return sum(x.nbytes for x in self.tensors[: 4 if self.backward else 3])


class Rank:
    """This rank of the group that measures; `answer` does what it is asked.

    It keeps the steps of one workload, whose contenders take turns.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._workload: Workload | None = None
        self._steps: dict[str, MeasuredStep] = {}
        self._checked: tuple[Workload, list[Tensor], dict[str, Any]] | None = None

    def answer(self, task: dict[str, Any]) -> Any:
        """Return what is asked for: links, or errors, seconds or costs of a contender."""
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
        """Return a step, whose tensors are those of another contender with the same tokens."""
        indices = contender.indices.to(self._device)
        for other in self._steps.values():
            heads = other.contender.heads
            mine = other.contender.indices.to(self._device)
            if heads == contender.heads and torch.equal(mine, indices):
                return MeasuredStep(contender, other.tensors, workload.backward)
        of_tensors = contender.heads, contender.kv_heads, contender.kv_heads, contender.heads
        dim, dtype = workload.head_dim, DTYPES[workload.dtype]
        drawn = [operands.draw(i, indices, n, dim, dtype) for i, n in enumerate(of_tensors)]
        return MeasuredStep(contender, tuple(drawn), workload.backward)

    def _step(self, workload: Workload, name: str) -> MeasuredStep:
        if name not in self._steps:
            batch = PackedBatch.of(workload.mask, workload.tokens)
            self._steps[name] = self._make(workload, self._contender(name, workload, batch))
        return self._steps[name]

    def _together(self) -> None:
        """Wait until all ranks are here, with nothing left to do."""
        self._comm.synchronize()
        self._comm.all_gather(torch.zeros(1, device=self._comm.device), label="sweep")
        self._comm.synchronize()

    def _seconds(self, step: Callable[[], object]) -> float:
        self._together()
        start = time.perf_counter()
        step()
        self._comm.synchronize()
        return time.perf_counter() - start

    def _costs(self, step: MeasuredStep, name: str) -> dict[str, Any]:
        """Return the memory and bytes of a step, and what of its communication is exposed."""
        sent = step.contender.sent_bytes
        step()  # the first one also makes what stays, as connections
        self._together()
        before = 0 if sent is None else sent()
        peak = memory.peak(step, self._device)
        found: dict[str, Any] = {
            "memory": None if peak is None else peak + step.operand_bytes,
            "bytes": None if sent is None else sent() - before,
            "exposure": None,
        }
        if name in attention_modules() and self._comm.size > 1:
            exposed = harness.exposed(step, self._comm, lambda: 0, EXPOSURE_ROUNDS)
            del exposed["bytes"]
            found["exposure"] = exposed
        return found

    def _check(self, workload: Workload, name: str) -> dict[str, Any]:
        """Return sums of errors of what the contender computes, and of what it is held to."""
        small = self._small(workload)
        batch = PackedBatch.of(small.mask, small.tokens)
        contender = self._contender(name, workload, batch)
        parts = range(self._comm.rank, workload.kv_heads, self._comm.size)
        kv = torch.tensor([*parts], dtype=torch.int64, device=self._device)
        group = workload.heads // workload.kv_heads
        q = (kv[:, None] * group + torch.arange(group, device=self._device)).flatten()
        own = q, q, kv, kv
        if name == ONE:  # it is compared on the same heads of the same tokens
            contender = contenders.one_device(batch, len(q), len(kv))
        everything = torch.arange(batch.tokens, device=self._device)
        of_tensors = workload.heads, workload.kv_heads, workload.kv_heads, workload.heads
        dtype = DTYPES[workload.dtype]
        whole = [
            operands.draw(i, everything, n, workload.head_dim, dtype)
            for i, n in enumerate(of_tensors)
        ]
        mine = [x[:, heads] for x, heads in zip(whole, (q, kv, kv, q), strict=True)]
        if name == ONE:
            found = MeasuredStep(contender, tuple(mine), workload.backward)() if len(kv) else []
        else:
            indices = contender.indices.to(self._device)
            local = MeasuredStep(contender, tuple(x[indices] for x in whole), workload.backward)()
            gathered = [self._whole(x, indices, batch.tokens) for x in local]
            found = [x[:, heads] for x, heads in zip(gathered, own, strict=False)]
        expected, result = self._expected(small, batch, mine)
        result = result | {"errors": reference.sums(found or expected, expected)}
        if workload.tokens > small.tokens and name != ONE:
            result["spot"] = self._spot(workload, name)
        return result

    @staticmethod
    def _small(workload: Workload) -> Workload:
        """Return a workload of the same kind of which everything can be compared."""
        if workload.tokens <= MAX_TOKENS_CHECKED:
            return workload
        step = 2 * workload.ranks  # some peers need as many chunks of one size
        tokens = MAX_TOKENS_CHECKED // step * step + workload.tokens % step
        return Workload(**workload.as_dict() | {"tokens": tokens})

    def _expected(
        self, small: Workload, batch: PackedBatch, mine: list[Tensor]
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """Return attention of this rank's heads in fp64, and the error of plain PyTorch."""
        if self._checked is None or self._checked[0] != small:
            exact, eager = (
                reference.attention(batch, q, k, v, dout if small.backward else None)
                for q, k, v, dout in ([x.double() for x in mine], mine)
            )
            self._checked = small, exact, {"eager": reference.sums(eager, exact)}
        return self._checked[1:]

    def _whole(self, x: Tensor, indices: Tensor, tokens: int) -> Tensor:
        """Return the rows of all ranks' tokens, in packed order."""
        gathered = {}
        counts = self._comm.all_gather(torch.tensor([len(x)], device=x.device), label="sweep")
        most = max(map(int, counts))
        for name, part in (("x", x), ("indices", indices)):
            padded = part.new_zeros(most, *part.shape[1:])
            padded[: len(part)] = part
            gathered[name] = self._comm.all_gather(padded, label="sweep")
        result = x.new_zeros(tokens, *x.shape[1:])
        for count, part, places in zip(counts, gathered["x"], gathered["indices"], strict=True):
            result[places[: int(count)]] = part[: int(count)]
        return result

    def _spot(self, workload: Workload, name: str) -> dict[str, Any]:
        """Return the errors of some rows of out of the workload itself, and of plain PyTorch."""
        step = self._step(workload, name)
        out = step()[0]
        local = len(out)
        spots = torch.linspace(
            0, local - 1, min(SPOT_CHECK_ROWS, local), device=self._device
        ).long()
        places = step.contender.indices.to(self._device)[spots]
        everything = torch.arange(workload.tokens, device=self._device)
        shape = workload.kv_heads, workload.head_dim, DTYPES[workload.dtype]
        k, v = (operands.draw(i, everything, *shape) for i in (operands.K, operands.V))
        batch, q = PackedBatch.of(workload.mask, workload.tokens), step.tensors[0][spots]
        exact = reference.rows(batch, places, q.double(), k, v)
        eager = reference.rows(batch, places, q, k, v)
        return {
            "errors": reference.sums([out[spots]], [exact]),
            "eager": reference.sums([eager], [exact]),
        }
