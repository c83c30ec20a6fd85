"""Record programs of trainers and of the attention servers that compute their tasks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import NamedTuple, NoReturn

from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import as_bool, as_int, check_function, shown
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server.compute import compute
from seqpar.servers.wire.request import Request
from seqpar.simulate.recording.program import Action, Copy, Post, Program, Serve, Wait
from seqpar.simulate.recording.recording import ProgramRecorder, recorded

_names = count()


def record_served(
    step: Callable[[RecordedPool], object],
    trainers: int,
    servers: int,
    *,
    operators: bool = True,
    copies: bool = False,
) -> list[Program]:
    """Return what trainers do in `step(pool)`, and what servers do for them: trainers come first.

    The step runs once for each trainer, in this process, with `DisaggregatedAttention(pool)` and
    layouts of one rank, on tensors of the meta device; `pool.trainer` says whose turn it is. What
    `attn.begin` has sent is computed while the trainer goes on, until `attn.finish`: two
    nano-batches may take turns. Nothing is computed or sent.

    Task i of trainer t goes to server (t + i) mod `servers`, as on servers that are alike. A server
    computes with the code of real ones. It takes tasks in the order in which they come, one
    after another, where real ones may take several at once, and holds one with its result. On a
    cluster ranks are trainers, and behind them servers. A task travels in one message, and so do
    results.

    Args:
        step: the code of a trainer.
        trainers, servers: how many there are.
        operators: as in `record`.
        copies: whether devices copy what they send to their host's memory first, and what they
            receive from there, as GPUs do; nothing else is done by them meanwhile.

    Raises:
        ValueError: what the step raises for wrong calls.
    """
    check_function("step", step)
    trainers, servers = as_int("trainers", trainers, 1), as_int("servers", servers, 1)
    counts, copies = as_bool("operators", operators), as_bool("copies", copies)
    tasks, programs = list[_Task](), list[Program]()
    for trainer in range(trainers):
        recorder = ProgramRecorder(True, counts)
        pool = RecordedPool(recorder, trainer, trainers, servers, tasks, copies)
        programs.append(recorded(partial(step, pool), recorder))
    return [*programs, *(_server(i, trainers, tasks, copies) for i in range(servers))]


class _Task(NamedTuple):
    """A task: its number among its trainer's, who computes it, the bytes, and what is computed."""

    number: int
    trainer: int
    server: int
    asked: int
    answered: int
    work: Program


class RecordedPool(ServerPool):
    """A pool of one trainer whose tasks are recorded, and go nowhere.

    Attributes:
        trainer: which one, counted from 0.
    """

    def __init__(
        self,
        recorder: ProgramRecorder,
        trainer: int,
        trainers: int,
        servers: int,
        tasks: list[_Task],
        copies: bool = False,
    ) -> None:
        self._name = f"recorded pool {next(_names)}"
        self.comm, self.trainer = Comm(self._name, 0, 1), trainer
        self._recorder, self._tasks, self._numbers = recorder, tasks, count()
        self._trainers, self._servers, self._copies = trainers, servers, copies

    def products(self, flops: int) -> None:
        """Record matrix products of so many FLOPs, which the trainer computes."""
        self._recorder.products(flops)

    def submit(self, request: Request) -> Future[tuple[Tensor, ...]]:
        """Record a task; return the future of its result."""
        if not isinstance(request, Request):
            raise ValueError(f"request must be a Request, got {shown(request)}")
        if not request.q.is_meta:
            raise ValueError(f"q must be on the meta device, got {request.q.device}")
        number = next(self._numbers)
        server = (self.trainer + number) % self._servers
        work, (peak, rank) = Program(), (self._recorder.operations.peak, self._trainers + server)
        with self._recorder.into(work):
            (result,) = compute([request], request.q.device)
        self._recorder.operations.peak = peak  # the server has that memory
        asked, answered = request.nbytes, sum(x.nbytes for x in result)
        self._tasks.append(_Task(number, self.trainer, server, asked, answered, work))
        what = f"task {request.operation}", number
        if self._copies:
            self._recorder.copy(asked)
        transfer = self._recorder.transfer
        transfer(_channel(self.trainer, rank), ((rank, asked),), (), *what)
        back = transfer(_channel(rank, self.trainer), (), ((rank, answered),), *what)
        return _Answer(self._recorder, back, tuple(result), answered if self._copies else 0)

    def dispatcher(self) -> NoReturn:
        raise ValueError("pool records tasks, and has no connection for anything else")

    def report(self) -> NoReturn:
        self.dispatcher()

    def close(self) -> None:
        """Do nothing: there is no connection."""


class _Answer(Future[tuple[Tensor, ...]]):
    """A result, whose wait is recorded."""

    def __init__(
        self, recorder: ProgramRecorder, number: int, tensors: tuple[Tensor, ...], copied: int
    ) -> None:
        super().__init__()
        self._recorder, self._number, self._tensors = recorder, number, tensors
        self._copied = copied

    def result(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """Record that the trainer waits; return tensors without data."""
        self._recorder.wait(self._number)
        if self._copied:
            self._recorder.copy(self._copied)
        return self._tensors


def _server(server: int, trainers: int, tasks: list[_Task], copies: bool) -> Program:
    """Return what a server does: it takes tasks as they come."""
    own = [x for x in tasks if x.server == server]
    program, rank, serve = Program(), trainers + server, Serve({})
    for i, x in enumerate(own):
        channel = _channel(x.trainer, rank)
        program.actions.append(Post(i, (), ((x.trainer, x.asked),), channel, "task", x.number))
    for i, x in enumerate(own):
        answer = (x.trainer, x.answered)
        channel = _channel(rank, x.trainer)
        reply = Post(len(own) + i, (answer,), (), channel, "result", x.number)
        work: list[Action] = x.work.actions
        if copies:
            work = [Copy(x.asked, "copy"), *work, Copy(x.answered, "copy")]
        serve.programs[i] = Program([*work, reply])
    program.actions += [serve, *(Wait(len(own) + i) for i in range(len(own)))]
    program.peak_bytes = max((x.asked + x.answered for x in own), default=0)
    return program


def _channel(source: int, target: int) -> str:
    return f"{source} to {target}"
