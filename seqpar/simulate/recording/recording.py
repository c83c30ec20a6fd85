"""Record programs: run each rank's code on tensors without data, and note what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import count

import torch

from seqpar.attention.backend import forced_backend
from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Exchange, Message
from seqpar.core.arguments import as_bool, as_int, as_ranks, check_function
from seqpar.core.compiling import outside_graphs
from seqpar.core.hooks import Moment, TracedWork, set_hooks
from seqpar.core.torch_private import beside_the_caller
from seqpar.costs.grid import slice_tasks
from seqpar.linear.attend import LinearWork
from seqpar.simulate.recording.operators import Operations
from seqpar.simulate.recording.program import (
    Action,
    Begin,
    Compute,
    End,
    LinearCompute,
    Post,
    Program,
    Sizes,
    SoftmaxCompute,
    Wait,
)
from seqpar.softmax.attend import SoftmaxWork

_names = count()


@outside_graphs
def record(
    step: Callable[[Comm], object],
    ranks: int,
    *,
    mesh: Sequence[int] | None = None,
    only: Iterable[int] | None = None,
    ordered: bool = True,
    operators: bool = True,
) -> list[Program]:
    """Return each rank's program: what the rank computes, sends and waits for in `step(comm)`.

    `step` runs once for each rank, in this process. It creates modules of seqpar on `comm`, the
    rank's group, and runs them forward and backward on tensors of the meta device. `comm.rank` and
    `comm.size` identify the rank; the step's result is ignored. No numbers are computed and no data
    is sent.

    Modes of the caller, such as `torch.no_grad`, anomaly mode, `FlopCounterMode` and `use_backend`,
    do not apply to `step`, which must enter the modes that it needs. Other threads can simulate or
    compute attention at the same time.

    Args:
        step: the code of one rank, which may also run linear modules, losses and whole models on
            meta tensors.
        ranks: the number of ranks.
        mesh: the shape of a mesh, (rows, ranks per row), for `MeshAttention` and `USPAttention`.
        only: the ranks whose programs are returned. None stands for all ranks.
        ordered: whether the ranks use NCCL, which runs the exchanges of a communicator one after
            another. With False, the ranks use gloo, and their devices are CPUs with one thread.
        operators: whether to record torch's operators in addition to attention's kernels: the FLOPs
            of matrix products, the bytes that other operators read and write, and the memory that
            is held. On CPUs, the memory within attention's kernels is included. On GPUs, only the
            sums to which kernels add their results are included. Recording operators takes about a
            third of the recording time.

    Raises:
        ValueError: if a call in the step is refused; if the step sends tensors with data, as
            `check_ranks` does; or if the step waits for an exchange that it did not post.
    """
    check_function("step", step)
    ranks, ordered = as_ranks("ranks", ranks), as_bool("ordered", ordered)
    shape = (ranks,) if mesh is None else tuple(as_int("mesh", x, 1) for x in mesh)
    if torch.Size(shape).numel() != ranks:
        raise ValueError(f"mesh must have {ranks} ranks in all, the argument ranks, got {shape}")
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
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        beside_the_caller(),
        forced_backend(None),
        set_hooks(
            traces=(recorder,),
            skip_messages=False,
            replace_compute=lambda area: None,
            dry_run=recorder.dry_run,
            beside=recorder.beside,
        ),
        recorder.operations,
    ):
        step()
    recorder.operations.flush()
    recorder.program.peak_bytes = recorder.operations.peak
    return recorder.program


class ProgramRecorder:
    """A `seqpar.core.hooks.Recorder` that makes a program of the events of a rank's code."""

    def __init__(self, ordered: bool, counts: bool, in_kernels: bool = True) -> None:
        """With `in_kernels=False`, the memory within attention's kernels is not counted."""
        self.program = Program(ordered=ordered)
        # Ranks on gloo are taken to be on CPUs. On the meta device, attention runs the code for
        # CPUs. The memory of this code is counted only for CPUs, because GPUs use other kernels.
        on_cpu = not ordered
        self.operations = Operations(lambda x: self.program.actions.append(x), counts, on_cpu)
        counts_kernels = counts and on_cpu and in_kernels
        self.dry_run = self.operations.memory_only if counts_kernels else None
        self._label, self._posted, self._computes = "", count(), count()

    def add(self, action: Action) -> None:
        """Append an action to the program, after the costs of all earlier torch operators."""
        self.operations.flush()
        self.program.actions.append(action)

    def begin(self, label: str, rank: int) -> None:
        self._label, self._computes = label, count()

    def compute(self, start: Moment, stop: Moment, work: TracedWork) -> None:
        call: SoftmaxCompute | LinearCompute
        if isinstance(work, SoftmaxWork):
            head_dim = -(-sum(work.dims) // 2)
            tasks = work.slices.derived("tasks", partial(slice_tasks, work.slices))
            call = SoftmaxCompute(tasks, work.batch * work.heads, head_dim, work.backward)
        else:
            assert isinstance(work, LinearWork)
            call = LinearCompute(*work[1:])
        self.add(Compute(call, self._label, next(self._computes), work.area))

    def exchange(self, *_: object) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext

    def beside(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record what `function` does as a program that runs concurrently. Returns a function that
        records waiting for the end of the concurrent program.
        """
        inner = Program()
        with self.into(inner):
            function()
        self.add(Begin(inner))
        return lambda: self.add(End(inner))

    @contextmanager
    def into(self, program: Program) -> Iterator[None]:
        """Within this context, append actions to `program`."""
        self.operations.flush()
        outer, self.program = self.program, program
        yield
        self.operations.flush()
        self.program = outer

    def post(self, channel: str, sends: Sizes, recvs: Sizes, what: str, step: int) -> int:
        """Record that the rank posts messages, and return the number of the exchange."""
        number = next(self._posted)
        self.add(Post(number, sends, recvs, channel, what, step))
        return number


class RecordingComm(Comm):
    """A rank of a group whose messages are recorded instead of sent."""

    def __init__(self, recorder: ProgramRecorder, rank: int, size: int, ordered: bool) -> None:
        super().__init__(f"recorded{next(_names)}", rank, size)
        self._recorder, self._ordered, self._through = recorder, ordered, ""

    def channel(self, name: str) -> Comm:
        """Return the same group on the communicator with this name. If the ranks use gloo, return
        this group unchanged.
        """
        if not self._ordered:
            return self
        channel = copy(self)
        channel._through = name
        return channel

    def runs_in_order(self, device: torch.device) -> bool:
        return self._ordered

    def start(self, sends: list[Message], recvs: list[Message], exchange: Exchange) -> Pending:
        label = exchange.label
        for _, x in (*sends, *recvs):
            if not x.is_meta:  # no other rank is running, so no data would arrive
                raise ValueError(
                    f"step must send tensors on the meta device only, but {label} sends one on "
                    f"{x.device}"
                )
        sent, received = (tuple((peer, x.nbytes) for peer, x in part) for part in (sends, recvs))
        number = self._recorder.post(self._through, sent, received, label, exchange.step)
        return _RecordedExchange(self._recorder, number, [sends, recvs])


class _RecordedExchange(Pending):
    def __init__(
        self, recorder: ProgramRecorder, number: int, messages: list[list[Message]]
    ) -> None:
        super().__init__([], messages)
        self._recorder: ProgramRecorder | None = recorder
        self._number = number

    def wait(self) -> None:
        if self._recorder is not None:
            self._recorder.add(Wait(self._number))
            self._recorder = None
        super().wait()
