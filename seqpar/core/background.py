"""Run an exchange beside the rank's computation: on a GPU in a stream, on a CPU in a thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch
from torch import Tensor

from seqpar.core.hooks import hooks

_MOST_THREADS = 2**15  # one for each exchange that is under way in this process at once


def run_async(function: Callable[[], None], *tensors: Tensor) -> Callable[[], None]:
    """Start `function()`, which uses these tensors, and return what waits for its end.

    On a GPU it comes after what the current stream has been given, and is waited for by the current
    stream; on a CPU, what it raises is raised there.
    """
    if hooks.beside is not None:
        return hooks.beside(function)
    device = tensors[0].device
    if device.type != "cuda":
        return threads().submit(partial(_run, function, torch.is_inference_mode_enabled())).result
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for x in tensors:  # which are freed before the stream has used them, if the call fails
        x.record_stream(stream)
    with torch.cuda.stream(stream):
        function()
    return lambda: torch.cuda.current_stream(device).wait_stream(stream)


def _run(function: Callable[[], None], inference: bool) -> None:
    """Call a function in the modes of another thread, which has modes of its own."""
    with torch.inference_mode(inference), torch.no_grad():
        function()


@cache
def threads() -> ThreadPoolExecutor:
    """Return the process's threads, which are started as they are needed, and then kept."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="seqpar")


os.register_at_fork(after_in_child=threads.cache_clear)  # threads are not forked


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream for exchanges, whose small kernels do not wait for large ones."""
    return torch.cuda.Stream(device, priority=-1)
