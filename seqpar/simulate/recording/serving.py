"""Record the programs of trainers and of the attention servers that compute for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import NamedTuple, NoReturn

from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import as_bool, as_int, check_function, shown
from seqpar.core.compiling import outside_graphs
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server.compute import compute
from seqpar.servers.wire.request import Request
from seqpar.simulate.recording.program import (
    Action,
    Compute,
    Copy,
    Operators,
    Post,
    Program,
    Serve,
    Wait,
)
from seqpar.simulate.recording.recording import ProgramRecorder, recorded

_names = count()


@outside_graphs
def record_served(
    step: Callable[[RecordedPool], object],
    trainers: int,
    servers: int,
    *,
    operators: bool = True,
    copies: bool = False,
) -> list[Program]:
    """Return the programs of trainers that run `step(pool)`, followed by the programs of their
    servers.

    A program is the list of what one process computes, sends and waits for.

    The step runs once for each trainer, in this process, with `DisaggregatedAttention(pool)`,
    layouts of one rank, and tensors of the meta device. `pool.trainer` identifies the trainer.
    Between `attn.begin` and `attn.finish`, servers compute the work that was submitted, and the
    trainer continues. A trainer can thus alternate between two parts of its documents, called
    nano-batches. No numbers are computed and no data is sent.

    Task i of trainer t is sent to server (t + i) mod `servers`. A server computes one task at a
    time, in order of arrival. Servers outside a simulation can compute several tasks together. On a
    cluster, the first ranks are the trainers, and the next ranks are the servers. Each task and
    each result is one message.

    Args:
        step: the code of a trainer.
        trainers, servers: the number of trainers, and the number of servers.
        operators: as in `record`.
        copies: whether everything that a device sends or receives is first copied to host memory,
            as with GPUs. A device does no other work during a copy.

    Raises:
        ValueError: if an argument is wrong, or if a call in the step is refused.
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
    number: int  # the task's index among the tasks of its trainer
    trainer: int
    server: int
    request_bytes: int
    reply_bytes: int
    work: Program


class RecordedPool(ServerPool):
    """A pool for one trainer that records tasks instead of sending them.

    Attributes:
        trainer: the trainer's number, from 0.
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
        self._recorder.add(Compute(Operators(flops, 0)))

    def submit(self, request: Request) -> Future[tuple[Tensor, ...]]:
        """Record a task, and return a future of its result, which has no data."""
        if not isinstance(request, Request):
            raise ValueError(f"request must be a Request, got {shown(request)}")
        if not request.q.is_meta:
            raise ValueError(
                f"q must be on the meta device where tasks are recorded, got {request.q.device}"
            )
        number, work = next(self._numbers), Program()
        server = (self.trainer + number) % self._servers
        trainer_peak = self._recorder.operations.peak
        with self._recorder.into(work):
            (result,) = compute([request], request.q.device)
        # The task uses memory of the server, not of the trainer.
        self._recorder.operations.peak = trainer_peak
        request_bytes, reply_bytes = request.nbytes, sum(x.nbytes for x in result)
        self._tasks.append(_Task(number, self.trainer, server, request_bytes, reply_bytes, work))
        if self._copies:
            self._recorder.add(Copy(request_bytes, "copy"))
        rank, label = self._trainers + server, f"task {request.operation}"
        there, back = _channel(self.trainer, rank), _channel(rank, self.trainer)
        self._recorder.post(there, ((rank, request_bytes),), (), label, number)
        reply = self._recorder.post(back, (), ((rank, reply_bytes),), label, number)
        actions: list[Action] = [Wait(reply)]
        if self._copies:
            actions.append(Copy(reply_bytes, "copy"))
        return _RecordedReply(self._recorder, actions, tuple(result))

    def dispatcher(self) -> NoReturn:
        raise ValueError("pool must be connected to servers, got a pool that only records tasks")

    def report(self) -> NoReturn:
        self.dispatcher()

    def close(self) -> None:
        pass


class _RecordedReply(Future[tuple[Tensor, ...]]):
    def __init__(
        self, recorder: ProgramRecorder, actions: list[Action], tensors: tuple[Tensor, ...]
    ) -> None:
        super().__init__()
        self._recorder, self._actions, self._tensors = recorder, actions, tensors

    def result(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """Record that the trainer waits, and return tensors without data."""
        for action in self._actions:
            self._recorder.add(action)
        return self._tensors


def _server(server: int, trainers: int, tasks: list[_Task], copies: bool) -> Program:
    own = [task for task in tasks if task.server == server]
    rank = trainers + server
    program, serve = Program(), Serve({})
    for i, task in enumerate(own):
        request = (task.trainer, task.request_bytes)
        channel = _channel(task.trainer, rank)
        program.actions.append(Post(i, (), (request,), channel, "task", task.number))
    for i, task in enumerate(own):
        result = (task.trainer, task.reply_bytes)
        channel = _channel(rank, task.trainer)
        reply = Post(len(own) + i, (result,), (), channel, "result", task.number)
        work: list[Action] = task.work.actions
        if copies:
            work = [Copy(task.request_bytes, "copy"), *work, Copy(task.reply_bytes, "copy")]
        serve.programs[i] = Program([*work, reply])
    program.actions += [serve, *(Wait(len(own) + i) for i in range(len(own)))]
    program.peak_bytes = max((x.request_bytes + x.reply_bytes for x in own), default=0)
    return program


def _channel(source: int, target: int) -> str:
    return f"{source} to {target}"
