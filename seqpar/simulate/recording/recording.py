"""Record programs: run a rank's own code on tensors without data, with messages that go nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.comm.messages.header import Exchange, Message
from seqpar.core.arguments import as_bool, as_int, check_function
from seqpar.core.hooks import Moment, TracedWork, hooks
from seqpar.costs.spans import slice_tasks
from seqpar.linear.attend import LinearWork
from seqpar.simulate.recording.operators import Operations
from seqpar.simulate.recording.program import (
    Begin,
    Compute,
    Copy,
    End,
    LinearCompute,
    Operators,
    Post,
    Program,
    SoftmaxCompute,
    Wait,
)
from seqpar.softmax.attend import SoftmaxWork

Sizes = tuple[tuple[int, int], ...]  # (rank, bytes) of each message
_names = count()


def record(
    step: Callable[[Comm], object],
    ranks: int,
    *,
    mesh: Sequence[int] | None = None,
    only: Iterable[int] | None = None,
    ordered: bool = True,
    operators: bool = True,
) -> list[Program]:
    """Return what each rank does in `step(comm)`: its program.

    The step runs once for each rank, in this process. It makes its modules on `comm`, the rank's
    group, which any module of seqpar takes, and runs them on tensors of the meta device, forward
    and backward; what it returns is ignored. `comm.rank` and `comm.size` say whose turn it is.
    Nothing is computed or sent.

    Args:
        step: the code of a rank; also linear modules, losses and whole models, on meta tensors.
        ranks: how many there are.
        mesh: the shape of a mesh of them, which `MeshAttention` and `USPAttention` need: (rows,
            ranks of a row).
        only: of which ranks to return programs; None: all.
        ordered: whether they are on NCCL, where a communicator's exchanges run one after another;
            otherwise on gloo.
        operators: whether to record torch's operators beside attention's kernels too: the FLOPs of
            matrix products, the bytes that others read and write, and the memory that is held. It
            takes more than half of the time.

    Raises:
        ValueError: what the step raises for wrong calls; and if it sends tensors with data, as
            `check_ranks` does, or waits for what it has not posted.
    """
    check_function("step", step)
    ranks, ordered = as_int("ranks", ranks, 1), as_bool("ordered", ordered)
    shape = (ranks,) if mesh is None else tuple(as_int("mesh", x, 1) for x in mesh)
    if torch.Size(shape).numel() != ranks:
        raise ValueError(f"mesh must have {ranks} ranks, got {shape}")
    chosen = range(ranks) if only is None else [as_int("only", x, 0, ranks - 1) for x in only]
    counts = as_bool("operators", operators)
    programs = []
    for rank in chosen:
        recorder = ProgramRecorder(ordered, counts)
        comm = RecordingComm(recorder, rank, ranks, ordered)
        comm.shape = shape
        programs.append(recorded(partial(step, comm), recorder))
    return programs


def recorded(step: Callable[[], object], recorder: ProgramRecorder) -> Program:
    """Return what one rank does."""
    with (
        hooks.set(
            trace=recorder,
            skip_messages=False,
            replace_compute=lambda area: None,
            beside=recorder.beside,
        ),
        recorder.operations,
    ):
        step()
    recorder.operations.flush()
    recorder.program.peak_bytes = recorder.operations.peak
    return recorder.program


class ProgramRecorder:
    """What a rank's code reports to (it is a `seqpar.core.hooks.Recorder`)."""

    def __init__(self, ordered: bool, counts: bool) -> None:
        self.program = Program(ordered=ordered)
        self.operations = Operations(self._add, counts)
        self._label, self._posted, self._computes = "", count(), count()

    def begin(self, label: str, rank: int) -> None:
        """Record that a strategy begins a pass."""
        self._label, self._computes = label, count()

    def compute(self, start: Moment, stop: Moment, work: TracedWork) -> None:
        """Record what attention computes."""
        self.operations.flush()
        found: SoftmaxCompute | LinearCompute
        if isinstance(work, SoftmaxWork):
            heads, head_dim = work.batch * work.heads, -(-sum(work.dims) // 2)
            tasks = work.slices.derived("tasks", partial(slice_tasks, work.slices))
            found = SoftmaxCompute(tasks, heads, head_dim, work.backward)
        else:
            assert isinstance(work, LinearWork)
            found = LinearCompute(*work[1:])
        self._add(Compute(found, self._label, next(self._computes), work.area))

    def products(self, flops: int) -> None:
        """Record matrix products of so many FLOPs."""
        self.operations.flush()
        self._add(Compute(Operators(flops, 0)))

    def exchange(self, *_: Any) -> Callable[[], AbstractContextManager[None]]:
        """Record nothing of it: the Comm does."""
        return nullcontext

    def beside(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record what runs beside the rank's computation; return what waits for its end."""
        inner = Program()
        with self.into(inner):
            function()
        self._add(Begin(inner))

        def join() -> None:
            self.operations.flush()
            self._add(End(inner))

        return join

    @contextmanager
    def into(self, program: Program) -> Iterator[None]:
        """Record into another program meanwhile."""
        self.operations.flush()
        outer, self.program = self.program, program
        yield
        self.operations.flush()
        self.program = outer

    def post(self, channel: str, sends: list[Message], recvs: list[Message], step: Exchange) -> int:
        """Record messages; return their exchange's number."""
        sent, received = (tuple((peer, x.nbytes) for peer, x in part) for part in (sends, recvs))
        return self.transfer(channel, sent, received, step.label, step.step)

    def transfer(self, channel: str, sends: Sizes, recvs: Sizes, what: str, step: int) -> int:
        """Record messages of so many bytes; return their exchange's number."""
        self.operations.flush()
        number = next(self._posted)
        self._add(Post(number, sends, recvs, channel, what, step))
        return number

    def copy(self, nbytes: int) -> None:
        """Record that bytes are copied to the host's memory, or from there."""
        self.operations.flush()
        self._add(Copy(nbytes, "copy"))

    def wait(self, number: int) -> None:
        """Record that the rank waits for an exchange."""
        self.operations.flush()
        self._add(Wait(number))

    def _add(self, action: Any) -> None:
        self.program.actions.append(action)


class RecordingComm(Comm):
    """A rank of a group whose messages are recorded, and go nowhere."""

    def __init__(self, recorder: ProgramRecorder, rank: int, size: int, ordered: bool) -> None:
        super().__init__(f"recorded{next(_names)}", rank, size)
        self._recorder, self._ordered, self._through = recorder, ordered, ""

    def channel(self, name: str) -> Comm:
        """Return these ranks through the communicator of this name; on gloo there is but one."""
        if not self._ordered:
            return self
        channel = copy(self)
        channel._through = name
        return channel

    def runs_in_order(self, device: torch.device) -> bool:
        return self._ordered

    def start(self, sends: list[Message], recvs: list[Message], exchange: Exchange) -> Pending:
        """Record messages."""
        for _, x in (*sends, *recvs):
            _check_meta(x, exchange.label)
        number = self._recorder.post(self._through, sends, recvs, exchange)
        return _Recorded(self._recorder, number)


class _Recorded(Pending):
    """Messages whose wait is recorded."""

    def __init__(self, recorder: ProgramRecorder, number: int) -> None:
        super().__init__([], [])
        self._recorder: ProgramRecorder | None = recorder
        self._number = number

    def wait(self) -> None:
        if self._recorder is not None:
            self._recorder.wait(self._number)
            self._recorder = None


def _check_meta(x: Tensor, label: str) -> None:
    """Raise a ValueError if a message has data: the other ranks' would be missing."""
    if not x.is_meta:
        raise ValueError(f"{label} sends a tensor on {x.device}; only meta tensors are recorded")
