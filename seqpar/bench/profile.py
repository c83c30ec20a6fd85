"""Time what a cost model is made of on this machine: attention, products, copies, one rank's.

`profile` returns a plain record with raw samples. `seqpar.costs` makes a description of it.

On a CPU a rank is one thread, and a time is that of its core: what other processes take meanwhile
does not count. On a GPU it is the clock's, once the device has finished.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from seqpar.bench.harness import environment, slug
from seqpar.layout.layout import Layout
from seqpar.layout.mask import UNLIMITED, Mask, Slices, slices_between
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.spans import LinearOptions, SpanStates
from seqpar.softmax.attend import attend_backward, attend_blocks
from seqpar.softmax.partial import Gradients, OutputGradient, SoftmaxOptions

ROUNDS = 5
SHORT = 0.005  # seconds


@dataclass(frozen=True)
class Setting:
    """What attention is timed with."""

    device: str
    dtype: torch.dtype
    heads: int
    head_dim: int
    backend: str

    @classmethod
    def of_this_machine(cls) -> Setting:
        """Return small heads in fp32 on a CPU, and a large model's in bf16 on a GPU.

        ATen is fastest on the one, and on the other only Triton's kernels know windows.
        """
        if torch.cuda.is_available():
            return cls("cuda", torch.bfloat16, 32, 128, "triton")
        return cls("cpu", torch.float32, 4, 64, "aten")

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of query rows of the grid."""
        return (128, 512, 2048, 8192, 32768) if self.device == "cuda" else (64, 256, 1024, 4096)

    @property
    def keys(self) -> tuple[int, ...]:
        """The numbers of keys that a row of the grid sees.

        On a CPU windows are cut into other tiles somewhere between 1,024 and 4,096.
        """
        return self.rows if self.device == "cuda" else (64, 256, 1024, 2048, 4096)


@dataclass(frozen=True)
class Shape:
    """Tasks of softmax attention in one call: `documents` of `rows` queries over `keys` keys.

    The queries are the last of a document's positions, and causal, except in a full one.
    """

    kind: str  # full, causal or window
    rows: int
    keys: int
    documents: int = 1
    window: int | None = None  # keys that a query sees, itself included

    def slices(self) -> Slices:
        """Return the slices that the call computes."""
        if self.kind == "full":
            q_rows, k_rows = np.array([[0, self.rows]]), np.array([[0, self.keys]])
            band = np.array([[-UNLIMITED, UNLIMITED]])
            queries, keys = (np.arange(n, dtype=np.int32) for n in (self.rows, self.keys))
            return Slices(q_rows, k_rows, band, queries, keys, k_rows)
        edges = np.arange(self.documents + 1)
        q, k = (Layout.contiguous(edges * n, 1).geometry for n in (self.rows, self.keys))
        window = (-1 if self.window is None else self.window - 1, -1)
        return slices_between(q, 0, k, 0, Mask.of(True, window, None, k))


class Softmax:
    """Calls of softmax attention over some slices."""

    def __init__(self, slices: Slices, setting: Setting) -> None:
        generator = torch.Generator(setting.device).manual_seed(0)
        self._slices = slices
        rows, keys = self._slices.query_rows, self._slices.key_rows
        self._q, self._k, self._v, dout = (
            torch.randn(
                1,
                n,
                setting.heads,
                setting.head_dim,
                generator=generator,
                dtype=setting.dtype,
                device=setting.device,
            )
            for n in (rows, keys, keys, rows)
        )
        self._options = SoftmaxOptions(setting.head_dim**-0.5, 0.0, setting.backend, True)
        out, lse = self.forward()
        self._output = OutputGradient.of(dout, None, out, lse, None)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute out and lse."""
        blocks = [(self._k, self._v)]
        return attend_blocks(self._q, blocks, [self._slices], self._options, None)

    def backward(self) -> None:
        """Compute the gradients."""
        gradients = Gradients.zeros(self._q, self._k, self._v)
        inputs = self._q, self._k, self._v
        attend_backward(self._output, *inputs, self._slices, gradients, self._options)


class Linear:
    """Calls of linear attention over one document."""

    def __init__(self, tokens: int, setting: Setting) -> None:
        generator = torch.Generator(setting.device).manual_seed(0)
        options: Any = {"generator": generator, "dtype": setting.dtype, "device": setting.device}
        shape = 4, 1, tokens, setting.heads, setting.head_dim
        self._inputs = torch.randn(shape, **options).unbind()
        self._spans = SpanStates(np.array([0, tokens]), np.array([-1]), np.array([-1]))
        decay = -torch.logspace(-9, -3, setting.heads, base=2, dtype=torch.float64)
        self._options = LinearOptions(1.0, True, setting.backend, decay.to(setting.device))

    def forward(self) -> None:
        """Compute out."""
        q, k, v, _dout = self._inputs
        steps = begin_forward(q, k, v, self._spans, self._options)
        steps.local()
        steps.finish(None)

    def backward(self) -> None:
        """Compute the gradients."""
        q, k, v, dout = self._inputs
        steps = begin_backward(q, k, v, dout, self._spans, self._options, None)
        steps.local()
        steps.finish(None)


def grid_shapes(row_nodes: Sequence[int], key_nodes: Sequence[int]) -> list[Shape]:
    """Return what is timed: each pair of nodes, full and with a window, and causal calls."""
    pairs = [(rows, keys) for rows in row_nodes for keys in key_nodes]
    full = [Shape("full", rows, keys) for rows, keys in pairs]
    # the first row already sees a whole window
    window = [Shape("window", rows, rows + keys - 1, 1, keys) for rows, keys in pairs]
    causal = [Shape("causal", tokens, tokens) for tokens in row_nodes]
    packed = [Shape("causal", few, few, row_nodes[-1] // few) for few in row_nodes[:2]]
    return full + window + causal + packed


Calls = Softmax | Linear


def contenders(
    shapes: Sequence[Shape], tokens: Sequence[int], setting: Setting
) -> list[tuple[dict[str, Any], Calls]]:
    """Return calls of softmax attention's shapes and of linear attention's tokens, these twice.

    The second time they have four times the heads. With each is its record, to which times are
    added.
    """
    softmax: list[tuple[dict[str, Any], Calls]] = [
        (asdict(shape), Softmax(shape.slices(), setting)) for shape in shapes
    ]
    linear: list[tuple[dict[str, Any], Calls]] = [
        ({"kind": "linear", "rows": n, "heads": each.heads}, Linear(n, each))
        for n in tokens
        for each in (setting, replace(setting, heads=4 * setting.heads))
    ]
    return softmax + linear


def take_turns(
    calls: Sequence[tuple[dict[str, Any], Calls]], device: str, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """Return each record with the raw seconds of its calls, forward and backward.

    All take turns, round after round, after one to warm up. A short call is made twice and timed
    once, since it depends on what the caches have of the call before.
    """
    samples = [record | {"forward": [], "backward": []} for record, _ in calls]
    for i in range(rounds + 1):
        for sample, (_, each) in zip(samples, calls, strict=True):
            for way in ("forward", "backward"):
                seconds = core_seconds(getattr(each, way), device)
                if seconds < SHORT:
                    seconds = core_seconds(getattr(each, way), device)
                if i:
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
    """Return raw rates: FLOP/s of a product and of a feed-forward module, bytes/s of a copy."""
    side, size = (8192, 2**30) if setting.device == "cuda" else (1024, 2**26)
    options: Any = {"dtype": setting.dtype, "device": setting.device}
    x, y = torch.randn(2, side, side, **options).unbind()
    up, down = torch.randn(side, 4 * side, **options), torch.randn(4 * side, side, **options)
    source = torch.empty(size, dtype=torch.uint8, device=setting.device).random_()
    target = torch.empty_like(source)
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "matmul": (2 * side**3, lambda: x @ y),
        "feed_forward": (16 * side**3, lambda: F.silu(x @ up) @ down),
        "copy": (2 * size, lambda: target.copy_(source)),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, (amount, call) in calls.items():
            seconds = core_seconds(call, setting.device)
            if i:
                found[name].append(amount / seconds)
    return found


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
