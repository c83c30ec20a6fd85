"""Run each computation on a single torch thread, so that bits do not depend on the thread count.

ATen and the libraries below it divide a matrix product among threads and add the parts in an order
that depends on the number of threads. On one thread, operands with the same shapes, strides and
alignment give the same bits. To use all cores, several computations run simultaneously instead.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def on_one_thread_each(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Run each job on one torch thread, and yield the results in the order of the jobs.

    The number of jobs that run simultaneously is the caller's number of torch threads, so jobs must
    not depend on each other. Up to that many finished results are held.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        for job in jobs:
            yield job()
        return
    workers, inference = _workers(os.getpid(), threads), torch.is_inference_mode_enabled()
    pending = deque[Future[T]]()
    try:
        for job in jobs:
            pending.append(workers.submit(_run, job, inference))
            del job  # it holds tensors
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _run(job: Callable[[], T], inference: bool) -> T:
    with torch.inference_mode(inference), torch.no_grad():
        return job()


@cache
def _workers(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the worker threads of a process; a forked process has its own."""
    lock = threading.Lock()

    def limit_this_thread() -> None:
        with lock:
            default = torch.get_num_threads()
            # This also sets the default of threads that start later, so another thread restores it.
            torch.set_num_threads(1)
            restore = threading.Thread(target=torch.set_num_threads, args=(default,))
            restore.start()
            restore.join()

    return ThreadPoolExecutor(threads, "seqpar one thread", limit_this_thread)
