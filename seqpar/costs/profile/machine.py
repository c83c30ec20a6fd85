"""Time the work of one rank on this machine: attention, matrix products and copies.

On a CPU, a rank is one thread, and times are CPU times of this thread, which do not include the
time of other processes. On a GPU, times are wall-clock times.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch

from seqpar.core.background import set_own_threads
from seqpar.core.memory import usable_memory
from seqpar.costs.profile.calls import Calls, LinearCalls, Modules, Setting, Shape, SoftmaxCalls
from seqpar.costs.profile.harness import PASSES, Profile, Sample, environment, slug

ROUNDS = 3
SHORT_CALL_SECONDS = 0.005  # shorter calls are repeated in each round
_end = ContextVar("end", default=math.inf)  # the monotonic time at which profiles must end


def grid_shapes(row_nodes: Sequence[int], key_nodes: Sequence[int]) -> list[Shape]:
    """Return the shapes of softmax attention to time.

    There are two calls for each pair of a number of rows and a number of keys: one with a full
    mask, and one with a window. In addition, there are a few causal calls.
    """
    pairs = [(rows, keys) for rows in row_nodes for keys in key_nodes]
    full = [Shape("full", rows, keys) for rows, keys in pairs]
    # Documents begin before the timed rows, so that even the first row has a whole window.
    window = [Shape("window", rows, rows + keys - 1, 1, keys) for rows, keys in pairs]
    causal = [Shape("causal", tokens, tokens) for tokens in row_nodes]
    packed = [Shape("causal", few, few, row_nodes[-1] // few) for few in row_nodes[:2]]
    return full + window + causal + packed


def contenders(
    shapes: Sequence[Shape], tokens: Sequence[int], setting: Setting
) -> list[tuple[Sample, Calls]]:
    """Return the calls to time, in this order: softmax attention, linear attention, linear modules.

    Linear attention and linear modules are timed for each number of tokens in `tokens`.
    """
    calls: list[tuple[Sample, Calls]] = [
        (shape.as_sample(), SoftmaxCalls(shape.slices(), setting)) for shape in shapes
    ]
    for n in tokens:
        for each in (setting, replace(setting, heads=4 * setting.heads)):
            calls.append(({"kind": "linear", "rows": n, "heads": each.heads}, LinearCalls(n, each)))
        modules = Modules(n, setting.width, setting)
        calls.append(({"kind": "modules", "rows": n, "flops": modules.flops}, modules))
    return calls


def take_turns(
    calls: Sequence[tuple[Sample, Calls]], device: str, rounds: int = ROUNDS
) -> list[Sample]:
    """Time calls several times, and return samples with all measured seconds.

    In each of the `rounds`, all calls run once, one after another. A short call first runs twice to
    fill caches.
    """
    samples: list[Sample] = [{**record, "forward": [], "backward": []} for record, _ in calls]
    for done in range(rounds):
        if done and time.monotonic() > _end.get():
            break  # one round suffices for an estimate
        for sample, (_, each) in zip(samples, calls, strict=True):
            for name in PASSES:
                if not done:
                    _check_time()
                elif time.monotonic() > _end.get():
                    continue
                seconds = core_seconds(getattr(each, name), device)
                if seconds < SHORT_CALL_SECONDS:
                    seconds = core_seconds(getattr(each, name), device)
                sample[name].append(seconds)
    return samples


def core_seconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def rates(setting: Setting, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return measured rates: FLOP/s of a large matrix product, and bytes/s that a copy reads and
    writes.

    On a CPU, the result also contains the bytes/s of filling new memory, the bytes/s of filling
    existing memory, and the number of operators per second.
    """
    side, size = (8192, 2**30) if setting.device == "cuda" else (1024, 2**26)
    x, y = torch.randn(2, side, side, dtype=setting.dtype, device=setting.device).unbind()
    source = torch.empty(size, dtype=torch.uint8, device=setting.device).random_()
    target = torch.empty_like(source)
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "matmul": (2 * side**3, lambda: x @ y),
        "copy": (2 * size, lambda: target.copy_(source)),
    }
    if setting.device == "cpu":
        calls |= _host_calls(setting.dtype)
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, (amount, call) in calls.items():
            _check_time()
            seconds = core_seconds(call, setting.device)
            if i:  # the first round warms up
                measured[name].append(amount / seconds)
    return measured


def _host_calls(dtype: torch.dtype) -> dict[str, tuple[float, Callable[[], object]]]:
    tensors, rows, count = 16, 2**19, 1000
    kept, small = torch.zeros(tensors, rows, dtype=dtype), torch.zeros(8, dtype=dtype)
    size = tensors * rows * dtype.itemsize

    def new() -> list[torch.Tensor]:
        # The results are kept, as in a training step. If they were freed, the allocator would reuse
        # their memory, so that no new memory would be measured.
        return [torch.empty(rows, dtype=dtype).fill_(1.0) for _ in range(tensors)]

    def operators() -> None:
        for _ in range(count):
            small.add_(1.0)

    return {
        "new": (size, new),
        "kept": (size, lambda: [x.fill_(1.0) for x in kept]),
        "operators": (count, operators),
    }


def memory() -> int:
    """Return the bytes of memory of a GPU. Without a GPU, return the memory that this process may
    use, divided by the number of cores.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return usable_memory() // devices()


def devices() -> int:
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def machine() -> str:
    """Return a file name for this machine, which contains the names of its devices."""
    return slug(f"{devices()} {environment()['device']}")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Within this context, profiles of this thread take at most `seconds`. If timing all calls once
    takes longer, an error is raised.
    """
    token = _end.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _end.reset(token)


def seconds_left() -> float:
    return _end.get() - time.monotonic()


def _check_time() -> None:
    if seconds_left() < 0:
        raise TimeoutError("the first round of measuring this machine took longer than allowed")


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    set_own_threads(1)  # sets only this thread's number, because other threads can be computing
    try:
        yield
    finally:
        set_own_threads(before)


def profile(rounds: int = ROUNDS, held_out: Sequence[tuple[Sample, Calls]] = ()) -> Profile:
    """Return a profile of this machine: its hardware and samples. The calls in `held_out` are also
    timed, but costs are not fitted to their samples.
    """
    setting = Setting.of_this_machine()
    here = environment()
    with one_thread():
        measured = rates(setting, rounds)
        calls = contenders(grid_shapes(setting.rows, setting.keys), setting.rows[1:], setting)
        samples = take_turns([*calls, *held_out], setting.device, rounds)
    return {
        "environment": {**here},
        "device": here["device"],
        "devices": devices(),
        "memory": memory(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "heads": setting.heads,
        "head_dim": setting.head_dim,
        "backend": setting.backend,
        "fused": setting.device == "cuda",
        "rates": measured,
        "samples": samples[: len(calls)],
        "held_out": samples[len(calls) :],
    }
