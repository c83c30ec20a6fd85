"""The strategy for attention servers: a trainer cuts each call into tasks, which servers compute.

A *trainer* is a process that calls attention and stores all tokens of the call. A *task* is a set
of query rows and key rows, and a *pass* is the forward or the backward computation of a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from seqpar.attention.backend import DEFAULT
from seqpar.attention.module import NO_OPTION
from seqpar.balance.disaggregation.disaggregate import TILE_ROWS
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import as_int
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.split_call import CutTask, cut_call
from seqpar.servers.wire.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_SLICES
from seqpar.servers.wire.request import Request, received
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients
from seqpar.softmax.strategy import ForwardResult, Gradients
from seqpar.softmax.tasks.split import SplitStrategy

ANY_SERVER = -1  # the peer in `Traffic`, because the server of a task is not known in advance


class Submitted(NamedTuple):
    """The tasks of a pass, and the futures of their results."""

    tasks: list[CutTask]
    futures: deque[Future[tuple[Tensor, ...]]]

    def results(self) -> Iterator[tuple[CutTask, tuple[Tensor, ...]]]:
        """Yield each task with its result, in the order of the tasks.

        If a task fails, this method raises the error of the task, and cancels all later tasks.
        """
        try:
            for task in self.tasks:
                yield task, received(self.futures.popleft())
        finally:
            self.cancel()

    def cancel(self) -> None:
        while self.futures:
            self.futures.popleft().cancel()


@dataclass(frozen=True)
class OnServers(SplitStrategy[Submitted, Submitted]):
    """A strategy that sends queries, keys and values to servers, which return the results.

    The trainer is the only rank. Tasks depend only on the call (`cut_call`), and the trainer merges
    and adds their results in a fixed order. The bits of the result therefore do not depend on which
    server computed which task.
    """

    name = "disaggregated"
    routable: ClassVar[bool] = False
    finds_max_logits: ClassVar[bool] = False
    rehearses: ClassVar[bool] = False
    tasks: int = 16  # the largest number of tasks of a call, except for one more task with the rest
    tile: int = TILE_ROWS  # the number of query rows that a kernel computes together
    pool: ServerPool | None = field(default=None, metadata=NO_OPTION)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", as_int("tasks", self.tasks, 1, 4096))
        object.__setattr__(self, "tile", as_int("tile", self.tile, 1, 2**20))

    def post(self, comm: Comm, call: ResolvedCall, operands: Operands) -> Submitted:
        return self._submit(comm, call, operands)

    def complete(self, posted: Submitted, call: ResolvedCall, operands: Operands) -> ForwardResult:
        q, _, v, sinks = operands
        total = Partial.nothing(q, v)
        for task, (out, lse) in posted.results():
            total.merge(task.queries, out, lse)
        return ForwardResult(*total.finish(sinks, q.dtype), [])

    def cancel(self, posted: Submitted) -> bool:
        posted.cancel()
        return True

    def post_gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
        at_once: bool,
    ) -> Submitted:
        output.ensure_delta()
        return self._submit(comm, call, operands, output)

    def complete_gradients(
        self,
        posted: Submitted,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
    ) -> Gradients:
        total = PartialGradients.zeros(operands.q, operands.k, operands.v)
        totals = [x.transpose(0, 1) for x in (total.dq, total.dk, total.dv)]
        for task, gradients in posted.results():
            rows = task.queries, task.keys, task.keys
            for own, x, into in zip(rows, gradients, totals, strict=True):
                own.add(x.transpose(0, 1), into)
        return total.results()

    def check(self, call: ResolvedCall) -> None:
        if call.options.slopes is not None:
            how = "call a strategy on a process group"
            raise ValueError(f"alibi_slopes must be None: servers do not compute ALiBi; {how}")
        if call.options.backend != DEFAULT:
            found = f"use_backend({call.options.backend!r})"
            why = "each server chooses its backend; make the call outside of use_backend"
            raise ValueError(f"backend must be {DEFAULT!r}, got {found}: {why}")
        s = call.shape
        for name, size, most in (
            ("q must have at most {} heads", s.heads, MAX_HEADS),
            ("q must have a head dim of at most {}", s.dim, MAX_HEAD_DIM),
            ("v must have a head dim of at most {}", s.value_dim, MAX_HEAD_DIM),
        ):
            if size > most:
                raise ValueError(f"{name.format(most)} on servers, got {size}")
        slices = max((len(task.slices) for task in self._tasks(call)), default=0)
        if slices > MAX_SLICES:
            how = "pass a larger number of `tasks`"
            raise ValueError(
                f"layout: a task may have at most {MAX_SLICES} slices, got {slices}; {how}"
            )

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        return [task.slices.area * call.shape.heads for task in self._tasks(call)]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        s, found = call.shape, []
        element, exact = s.dtype.itemsize, accumulator_dtype(s.dtype).itemsize
        both, statistics = s.dim + s.value_dim, (2 + call.return_lse) * exact
        for number, task in enumerate(self._tasks(call)):
            queries, keys = (s.batch * rows.count for rows in (task.queries, task.keys))
            tables = 48 * len(task.slices) + 4 * (task.queries.count + task.keys.count)
            fixed = tables + keys * s.kv_heads * both * element
            forward = fixed + queries * s.heads * s.dim * element
            backward = fixed + queries * s.heads * (both * element + statistics)
            for direction, nbytes in (("forward", forward), ("backward", backward)):
                found.append(Traffic(direction, number, ANY_SERVER, 1, nbytes))
        return found

    def _tasks(self, call: ResolvedCall) -> list[CutTask]:
        if not call.shape.batch:
            return []
        key = "tasks for servers", self.tasks, self.tile
        return call.once(key, lambda: cut_call(call, self.tasks, self.tile))

    def _submit(
        self,
        comm: Comm,
        call: ResolvedCall,
        operands: Operands,
        output: OutputGradient | None = None,
    ) -> Submitted:
        """Submit the tasks of a pass. Each task is submitted as soon as its request was made."""
        assert self.pool is not None
        submitted = Submitted(self._tasks(call), deque())
        try:
            for task in submitted.tasks:
                request = _request(call, task, operands, output)
                submitted.futures.append(self.pool.submit(request))
                comm.count(1, request.nbytes)
        except BaseException:
            submitted.cancel()
            raise
        return submitted


def _request(
    call: ResolvedCall, task: CutTask, operands: Operands, output: OutputGradient | None = None
) -> Request:
    """Return the request for a task's forward pass or, if `output` is given, its backward pass."""
    queries, keys, (q, k, v, _) = task.queries, task.keys, operands
    rows = queries.select(q), keys.select(k), keys.select(v)
    if output is None:
        # If nothing is merged into this result, the server can round it to q's dtype.
        final = task.whole and not call.has_sinks
        return Request(*rows, task.slices, call.options, exact_out=not final)
    dout, lse, delta = (queries.select(x) for x in (output.dout, output.lse, output.ensure_delta()))
    dlse = None if output.dlse is None else queries.select(output.dlse)
    of_rows = OutputGradient(dout, None, lse, dlse, delta)
    return Request(*rows, task.slices, call.options, output=of_rows)
