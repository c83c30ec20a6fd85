"""Run computations on one torch thread each, so that bits do not depend on the number of threads.

ATen and the libraries under it divide a matrix product among threads, and sum it in an order that
depends on how many there are. On one thread, operands of the same shapes, strides and alignment
give the same bits. Several computations run simultaneously instead.
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
    """Yield the results of jobs in their order.

    Each job runs on one torch thread. As many run simultaneously as the caller has torch threads,
    so they must not depend on each other. Up to that many results wait to be yielded.
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
            del job  # and the tensors
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
    """Return the workers of a process (a fork has none of its parent's), started when needed."""
    lock = threading.Lock()

    def begin() -> None:
        """Give this thread one torch thread, and later threads the default of before."""
        with lock:
            default = torch.get_num_threads()
            torch.set_num_threads(1)  # which is also the default of threads that start later
            restore = threading.Thread(target=torch.set_num_threads, args=(default,))
            restore.start()
            restore.join()

    return ThreadPoolExecutor(threads, "seqpar one thread", begin)
