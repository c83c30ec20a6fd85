"""Run an exchange while the rank computes. On a GPU, the exchange runs in a separate stream, and on
a CPU in a thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

import torch
from torch import Tensor

from seqpar.core.hooks import hooks, with_hooks

T = TypeVar("T")
Job = tuple[Future[None], Callable[[], None]]  # the future of a function's result, and the function


def run_async(function: Callable[[], None], *tensors: Tensor) -> Callable[[], None]:
    """Start `function()`, which uses the given tensors. Return a second function, which waits until
    `function` has ended.

    On a GPU, `function` runs after all work that is queued on the current stream, and the second
    function makes the current stream wait. On a CPU, the second function raises the error of
    `function`.
    """
    if (beside := hooks().beside) is not None:
        return beside(function)
    device = tensors[0].device
    if device.type != "cuda":
        return threads().submit(in_this_mode(function)).result
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for x in tensors:  # if the call fails, they would be freed before the stream has used them
        x.record_stream(stream)
    with torch.cuda.stream(stream):
        function()
    return lambda: torch.cuda.current_stream(device).wait_stream(stream)


def in_this_mode(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that other threads call, and that runs `function` with this thread's
    inference mode and hooks.

    `function` runs without autograd.
    """
    inference, observed = torch.is_inference_mode_enabled(), with_hooks(function)

    def run() -> T:
        with torch.inference_mode(inference), torch.no_grad():
            return observed()

    return run


class Worker:
    """A thread that runs jobs in order, and ends with this object.

    The thread is a daemon, so the process can end while a job waits for a peer.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((future, job))
        return future


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (submitted := jobs.get()) is not None:
        future, job = submitted
        try:
            job()
            future.set_result(None)
        except BaseException as error:  # raised where the exchange is waited for
            future.set_exception(error)
        del submitted, future, job  # also frees the tensors


class _Workers:
    """Threads that run one job at a time. A thread is started if all threads are busy, and is
    reused for later jobs.
    """

    def __init__(self) -> None:
        self._idle: list[Worker] = []

    def submit(self, job: Callable[[], None]) -> Future[None]:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = Worker("seqpar exchange")

        def run() -> None:
            try:
                job()
            finally:
                self._idle.append(worker)

        return worker.submit(run)


@cache
def _setting_threads() -> AbstractContextManager[bool]:
    return Lock()


def set_own_threads(count: int) -> None:
    """Set the number of torch threads of this thread only."""

    def in_a_new_thread(function: Callable[[], None]) -> None:
        thread = Thread(target=function)
        thread.start()
        thread.join()

    torch.get_num_threads()  # otherwise torch would set this thread's number at its first operator
    default = list[int]()
    with _setting_threads():
        in_a_new_thread(lambda: default.append(torch.get_num_threads()))
        torch.set_num_threads(count)  # also sets the number of threads that start later
        in_a_new_thread(lambda: torch.set_num_threads(*default))


@cache
def threads() -> _Workers:
    return _Workers()


os.register_at_fork(after_in_child=threads.cache_clear)  # threads are not forked
os.register_at_fork(after_in_child=_setting_threads.cache_clear)  # a thread may have held the lock


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream with high priority for exchanges."""
    return torch.cuda.Stream(device, priority=-1)
