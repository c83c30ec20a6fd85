"""Run an exchange while the rank computes: on a GPU in a stream, on a CPU in a thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from seqpar.core.hooks import hooks

_MAX_THREADS = 2**15  # one for each exchange under way in this process


def run_async(function: Callable[[], None], *tensors: Tensor) -> Callable[[], None]:
    """Start `function()`, which uses these tensors, and return a function that waits for it.

    On a GPU it runs after all work queued on the current stream, and the returned function makes
    the current stream wait. On a CPU, the returned function raises the error of `function`.
    """
    if hooks.beside is not None:
        return hooks.beside(function)
    device = tensors[0].device
    if device.type != "cuda":
        return threads().submit(in_this_mode(function)).result
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for x in tensors:  # which are freed before the stream has used them, if the call fails
        x.record_stream(stream)
    with torch.cuda.stream(stream):
        function()
    return lambda: torch.cuda.current_stream(device).wait_stream(stream)


def in_this_mode(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function for other threads, which have their own modes, without autograd."""
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            function()

    return run


@cache
def threads() -> ThreadPoolExecutor:
    """Return the process's threads, started as they are needed and then kept."""
    return ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="seqpar")


os.register_at_fork(after_in_child=threads.cache_clear)  # threads are not forked


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream for exchanges, whose small kernels do not wait for large ones."""
    return torch.cuda.Stream(device, priority=-1)
