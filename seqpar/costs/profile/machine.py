"""Time what a cost model is made of on this machine: attention, products, copies, one rank's.

`profile` returns a plain record with raw samples. `seqpar.costs` makes a description of it.

On a CPU a rank is one thread, and a time is that of its core: what other processes take meanwhile
does not count. On a GPU it is the clock's, once the device has finished.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any

import torch

from seqpar.costs.profile.calls import Calls, LinearCalls, Modules, Setting, Shape, SoftmaxCalls
from seqpar.costs.profile.harness import environment, slug

ROUNDS = 3
_end = ContextVar("end", default=math.inf)  # when to stop, by the monotonic clock
SHORT_CALL_SECONDS = 0.005  # a shorter call is repeated in each round


def grid_shapes(row_nodes: Sequence[int], key_nodes: Sequence[int]) -> list[Shape]:
    """Return what is timed: each pair of nodes, full and with a window, and causal calls."""
    pairs = [(rows, keys) for rows in row_nodes for keys in key_nodes]
    full = [Shape("full", rows, keys) for rows, keys in pairs]
    # the first row already sees a whole window
    window = [Shape("window", rows, rows + keys - 1, 1, keys) for rows, keys in pairs]
    causal = [Shape("causal", tokens, tokens) for tokens in row_nodes]
    packed = [Shape("causal", few, few, row_nodes[-1] // few) for few in row_nodes[:2]]
    return full + window + causal + packed


def contenders(
    shapes: Sequence[Shape], tokens: Sequence[int], setting: Setting
) -> list[tuple[dict[str, Any], Calls]]:
    """Return calls of softmax attention's shapes, and of the rest over so many tokens each.

    That is linear attention, twice, the second time with four times the heads, and a linear module.
    With each is its record, to which times are added.
    """
    found: list[tuple[dict[str, Any], Calls]] = [
        (asdict(shape), SoftmaxCalls(shape.slices(), setting)) for shape in shapes
    ]
    for n in tokens:
        for each in (setting, replace(setting, heads=4 * setting.heads)):
            found.append(({"kind": "linear", "rows": n, "heads": each.heads}, LinearCalls(n, each)))
        modules = Modules(n, setting.width, setting)
        found.append(({"kind": "modules", "rows": n, "flops": modules.flops}, modules))
    return found


def take_turns(
    calls: Sequence[tuple[dict[str, Any], Calls]], device: str, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """Return each record with the raw seconds of its calls, forward and backward.

    All take turns, round after round. A short call is made twice and timed once, since it depends
    on what the caches have of the call before.
    """
    samples = [record | {"forward": [], "backward": []} for record, _ in calls]
    for done in range(rounds):
        if done and time.monotonic() > _end.get():
            break  # one round is enough for an estimate
        for sample, (_, each) in zip(samples, calls, strict=True):
            for way in ("forward", "backward"):
                if not done:
                    _check_time()
                elif time.monotonic() > _end.get():
                    continue
                seconds = core_seconds(getattr(each, way), device)
                if seconds < SHORT_CALL_SECONDS:
                    seconds = core_seconds(getattr(each, way), device)
                sample[way].append(seconds)
    return samples


def core_seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call: of this process's core, or of a GPU."""
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
    """Return raw rates: FLOP/s of a large product, and bytes/s of a copy, both ways counted.

    On a CPU also bytes/s of filling memory, new and kept, and operators a second.
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
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, (amount, call) in calls.items():
            _check_time()
            seconds = core_seconds(call, setting.device)
            if i:
                found[name].append(amount / seconds)
    return found


def _host_calls(dtype: torch.dtype) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return calls that fill memory, new and kept, and many calls of a small operator.

    New memory is set aside while that of results before it is still in use, as in a step: what is
    freed at once is found again, and costs nothing.
    """
    many, rows, count = 16, 2**19, 1000
    kept, small = torch.zeros(many, rows, dtype=dtype), torch.zeros(8, dtype=dtype)
    size = many * rows * dtype.itemsize

    def new() -> list[torch.Tensor]:
        return [torch.empty(rows, dtype=dtype).fill_(1.0) for _ in range(many)]

    def operators() -> None:
        for _ in range(count):
            small.add_(1.0)

    return {
        "new": (size, new),
        "kept": (size, lambda: [x.fill_(1.0) for x in kept]),
        "operators": (count, operators),
    }


def memory() -> int:
    """Return the bytes of a device: a GPU's, or a core's part of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices()


def devices() -> int:
    """Return how many GPUs there are, or cores that this process may use."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def machine() -> str:
    """Return this machine's devices as the name of a file."""
    return slug(f"{devices()} {environment()['device']}")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let profiles made in this context, by this thread, take this long.

    Later rounds are left out. If the first one does not fit, `profile` raises a TimeoutError.
    """
    token = _end.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _end.reset(token)


def seconds_left() -> float:
    """Return the seconds that a profile may still take; ∞ outside of `within`."""
    return _end.get() - time.monotonic()


def _check_time() -> None:
    if seconds_left() < 0:
        raise TimeoutError("this machine could not be measured in the time allowed")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as a rank on a CPU does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def profile(
    rounds: int = ROUNDS, held_out: Sequence[tuple[dict[str, Any], Calls]] = ()
) -> dict[str, Any]:
    """Return what this machine is, and raw samples of what it takes, all of one rank.

    What is `held_out` takes turns with the samples, and is kept apart from them.
    """
    setting = Setting.of_this_machine()
    found = environment()
    with one_thread():
        measured = rates(setting, rounds)
        calls = contenders(grid_shapes(setting.rows, setting.keys), setting.rows[1:], setting)
        samples = take_turns([*calls, *held_out], setting.device, rounds)
    return {
        "environment": found,
        "device": found["device"],
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
