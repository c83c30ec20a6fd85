"""One rank of a fake group: a call costs only the host's time.

Messages are not sent, tensors are so small that copies take no time, launches of our Triton kernels
are replaced, and work of threads runs immediately, as in a stream on a GPU. All other code is the
same as on a GPU. Times are CPU times of the thread, so other processes change them little.

With the kernel "triton", the backend of this name computes. With "FlashAttention-4", the default
path on an H200 computes, for which tensors on the CPU pass for tensors on the GPU. A stand-in takes
the place of FlashAttention-4: it allocates its results.

`overhead.py` starts this file, `python -P overhead_rank.py TREE KERNEL`, once for each tree of
sources that it compares. Each line of JSON on stdin gets one line as its answer.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

RANKS, RANK, MESH = 8, 3, (2, 4)  # a rank in the middle; USP's mesh
DOCUMENTS, TOKENS = 32, 1024  # of the packed batch
HEADS, KV_HEADS = 32, 8
DIMS = {"triton": 2, "FlashAttention-4": 8}  # of a head, the least that a kernel computes
WARM_UP = 3  # calls of a layout before those that are timed

# ATen's operators that move rows from or into messages, and add returned gradients and weighted
# states; operators that merge partial results, since TokenRing has no kernel for them; and
# operators that make the zero gradients to which kernels add.
_KINDS = {
    "copies": {
        *("copy_", "index_copy_", "index_put_", "_index_put_impl_", "add_", "index_add_"),
        *("clone", "_to_copy", "index_select", "index", "cat", "stack"),
        *("embedding_bag", "addcmul_"),
    },
    "merges": {"sub", "sigmoid_", "nan_to_num_", "lerp_", "logaddexp"},
    "fills": {"new_zeros", "zero_"},
}


class Event(NamedTuple):
    """Device work of a call: a message, a copy, a merge, a fill or a kernel's launch."""

    kind: str  # "messages", "copies", "merges", "launches" or "fills"
    function: Callable[..., Any]
    positional: tuple[Any, ...]
    named: dict[str, Any]


class Recorder(TorchDispatchMode):
    """Records the messages, copies and launches within its context."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._patches = ExitStack()

    def __enter__(self) -> Recorder:
        group = dist.group.WORLD
        for poster in (type(group), type(group._get_backend(torch.device("cpu")))):
            for name in ("send", "recv"):
                noting = self._noting(getattr(poster, name), name == "send")
                self._patches.enter_context(mock.patch.object(poster, name, noting))
        super().__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)
        self._patches.close()

    def _noting(self, post: Callable[..., Any], sends: bool) -> Callable[..., Any]:
        operation, end = (dist.isend, "group_dst") if sends else (dist.irecv, "group_src")

        def noting(group: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
            named = {"group": dist.group.WORLD, end: peer}
            tensor = torch.empty_like(tensors[0])
            self.events.append(Event("messages", operation, (tensor,), named))
            return post(group, tensors, peer, tag)

        return noting

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        kind = next((kind for kind, names in _KINDS.items() if name in names), None)
        if kind is None or not _first(result).numel():
            return result
        if kind == "fills":
            function, args, kwargs = torch.empty_like(result).zero_, (), {}
        elif name == "copy_" and args[0].data_ptr() == args[1].data_ptr():
            return result  # a copy onto itself, as in x[i] += y
        self.events.append(Event(kind, function, args, kwargs or {}))
        return result


def _first(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    return results[0] if isinstance(results, tuple) else results


recorder: Recorder | None = None  # of the current call, if it is recorded


class Compiled:
    """Stands for a compiled kernel, which is launched again without Triton's look-up of it."""

    def __init__(self, event: Callable[[Sequence[Any]], Event]) -> None:
        self._event = event

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run

    def _run(self, *arguments: Any) -> None:
        if recorder is not None:
            recorder.events.append(self._event(arguments))


def launch(
    kernel: Any, *positional: Any, grid: Any, warmup: bool = False, **named: Any
) -> Compiled:
    """Replace `JITFunction.run`; launch nothing. The floor always calls `kernel[grid](…)`."""

    def event(arguments: Sequence[Any]) -> Event:
        again = lambda *args, **kwargs: kernel[grid](*args, **kwargs)  # noqa: E731
        return Event("launches", again, tuple(arguments[: len(positional)]), named)

    if recorder is not None:
        recorder.events.append(event(positional))
    return Compiled(event)


def run_at_once(_: Any, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Replace `ThreadPoolExecutor.submit`."""
    future: Future[Any] = Future()
    future.set_result(function(*args))
    return future


class Floor:
    """A bare loop that repeats only the device work of a recorded call.

    Consecutive messages form an exchange, whose receives are posted first.
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def counts(self) -> dict[str, int]:
        """Return the numbers of exchanges, messages, copies and launches."""
        posted = [x.function if x.kind == "messages" else None for x in self._events]
        exchanges = sum(
            now is not None and (before is None or (before, now) == (dist.isend, dist.irecv))
            for before, now in pairwise([None, *posted])
        )
        return {"exchanges": exchanges, **Counter(event.kind for event in self._events)}

    @torch.no_grad()
    def __call__(self) -> None:
        works = []
        for kind, function, positional, named in self._events:
            result = function(*positional, **named)
            if kind == "messages":
                works.append(result)
        for work in works:
            work.wait()


class Case:
    """A strategy on a layout: its calls, and their microseconds."""

    within = 0  # nanoseconds of the last pass of any strategy

    def __init__(self, name: str, layout: str, kernel: str) -> None:
        from seqpar import LASP2Attention, Layout, USPAttention, make_attention

        self._times: dict[str, list[float]] = {}
        lengths = np.random.default_rng(0).multinomial(TOKENS, np.full(DOCUMENTS, 1 / DOCUMENTS))
        self._layout = getattr(Layout, layout)(np.r_[0, np.cumsum(lengths)], RANKS)
        self._options: dict[str, Any] = {}
        strategy, *transport = name.split()
        if transport:
            self._attention = LASP2Attention(dist.group.WORLD, *transport)
            self._options["log_decay"] = -torch.linspace(0.01, 0.1, KV_HEADS)
        elif strategy == "usp":
            self._attention = USPAttention(dist.device_mesh.init_device_mesh("cpu", MESH))
        else:
            self._attention = make_attention(strategy, dist.group.WORLD)
        tokens = self._layout.token_indices(RANK).numel()
        self._operands = [
            torch.randn(tokens, heads, DIMS[kernel], dtype=torch.float16, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self._dout = torch.randn(tokens, HEADS, DIMS[kernel], dtype=torch.float16)
        self._time_strategy()
        for _ in range(WARM_UP):
            self.call()
        self.floors = self._floors()

    def _time_strategy(self) -> None:
        """Also time the strategy's own methods, within the module's call."""
        strategy = self._attention._bound.strategy
        for direction in ("forward", "backward"):
            if direction in vars(strategy):
                continue  # another case has wrapped this strategy already

            method = getattr(strategy, direction)

            def timed(*args: Any, _method: Any = method) -> Any:
                start = time.thread_time_ns()
                with recorder or nullcontext():  # a mode around the call would see one operator
                    result = _method(*args)
                Case.within = time.thread_time_ns() - start
                return result

            object.__setattr__(strategy, direction, timed)

    def _floors(self) -> dict[str, Floor]:
        global recorder
        floors, out = {}, None
        for direction in ("forward", "backward"):
            recorder = Recorder()
            out = self._forward() if out is None else out.backward(self._dout)
            floors[direction] = Floor(recorder.events)
        recorder = None
        return floors

    def _forward(self) -> Tensor:
        return self._attention(*self._operands, self._layout, causal=True, **self._options)

    def _note(self, direction: str, function: Callable[[], Any]) -> Any:
        start = time.thread_time_ns()
        result = function()
        total = time.thread_time_ns() - start
        for key, nanoseconds in (("call", total), ("strategy", Case.within)):
            self._times.setdefault(f"{direction} {key}", []).append(nanoseconds / 1e3)
        return result

    def call(self) -> None:
        """Time a call and its backward."""
        for x in self._operands:
            x.grad = None
        out = self._note("forward", self._forward)
        self._note("backward", lambda: out.backward(self._dout))

    def turn(self, calls: int) -> dict[str, list[float]]:
        """Return the microseconds of these calls, of the strategy's part, and of their floors."""
        self._times = {}
        gc.collect()
        gc.disable()
        for _ in range(calls):
            self.call()
            for direction, floor in self.floors.items():
                start = time.thread_time_ns()
                floor()
                microseconds = (time.thread_time_ns() - start) / 1e3
                self._times.setdefault(f"{direction} floor", []).append(microseconds)
        gc.enable()
        return self._times


def pass_for_a_gpu() -> None:
    """Let tensors on the CPU pass for tensors on an H200 with FlashAttention-4, from now on."""
    from seqpar.kernels.gpus import Gpu, assume

    from seqpar.softmax import result_dtypes
    from seqpar.softmax.backends import flash_attn

    def kernel_on_a_gpu(operands: Any, options: Any, device: torch.device) -> Any:
        return flash_attn.kernel_for(operands, options, True, device)

    # Messages then have the dtype that they have on a GPU.
    result_dtypes.preferred_kernel = kernel_on_a_gpu
    assume(torch.device("cpu"), Gpu("NVIDIA H200", 9, 132))
    torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment, method-assign]
    package = ModuleType("flash_attn.cute.interface")
    softcaps = {
        name: lambda softcap_val: None
        for name in ("create_softcap_scoremod", "create_softcap_scoremod_bwd")
    }
    vars(package).update(
        _flash_attn_fwd=flash_attn_fwd, _flash_attn_bwd=flash_attn_bwd,
        utils=SimpleNamespace(**softcaps),
    )  # fmt: skip
    sys.modules[package.__name__] = package
    flash_attn.installed_version = lambda _: "4.0.0b36"


def flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, softmax_scale: float, causal: bool, softcap: float, window_size_left: Any,
    window_size_right: Any, return_lse: bool, score_mod: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if recorder is not None:
        recorder.events.append(Event("launches", _allocate_forward, (q, v), {}))
    return _allocate_forward(q, v)


def flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, cu_seqlens_q: Any,
    cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, softmax_scale: float, causal: bool,
    softcap: float, window_size_left: Any, window_size_right: Any, deterministic: bool, dlse: Any,
    dq: Any = None, dk: Any = None, dv: Any = None, score_mod: Any = None,
    score_mod_bwd: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if recorder is not None:
        recorder.events.append(Event("launches", _allocate_backward, (q, k, v), {}))
    return _allocate_backward(q, k, v)


def _allocate_forward(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    *batch, rows, heads, _ = q.shape
    lse = torch.empty((*batch, heads, rows), dtype=torch.float32)
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype), lse


def _allocate_backward(*operands: Tensor) -> tuple[Tensor, ...]:
    return tuple([torch.empty(x.shape, dtype=x.dtype) for x in operands])


class KernelsOf:
    """Finds `seqpar.kernels`, the folder triton_kernels, in a tree of sources."""

    def __init__(self, tree: Path) -> None:
        self._folder = tree / "triton_kernels"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's specification."""
        if name != "seqpar.kernels":
            return None
        file, where = self._folder / "__init__.py", [str(self._folder)]
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=where)


def stand_ins() -> None:
    """Replace threads, kernels and other ranks, for the rest of the process."""
    triton.knobs.runtime.interpret = False  # kernels are made as for a GPU …
    import seqpar.softmax.backends.triton  # noqa: F401

    linear = "seqpar.linear.states" if importlib.util.find_spec("seqpar.linear.states") else ""
    importlib.import_module(f"{linear or 'seqpar.linear'}.backends.triton")  # where it once was
    triton.knobs.runtime.interpret = True  # … and the backend takes tensors on a CPU
    JITFunction.run = launch
    ThreadPoolExecutor.submit = run_at_once  # type: ignore[method-assign]
    dist.init_process_group("cpu:fake", store=FakeStore(), rank=RANK, world_size=RANKS)


def serve(tree: Path, kernel: str) -> None:
    """Answer requests until stdin ends."""
    sys.path.insert(0, str(tree))
    sys.meta_path.insert(0, KernelsOf(tree))  # type: ignore[arg-type]
    from seqpar import use_backend

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # buffers hold arbitrary numbers, and sums of denormals are slow
    stand_ins()
    if kernel == "FlashAttention-4":
        pass_for_a_gpu()
    cases: dict[tuple[str, str], Case] = {}
    with use_backend("triton") if kernel == "triton" else nullcontext():
        for line in sys.stdin:
            name, layout, calls = json.loads(line)
            if (name, layout) not in cases:
                cases[name, layout] = Case(name, layout, kernel)
            case = cases[name, layout]
            counts = {direction: floor.counts() for direction, floor in case.floors.items()}
            print(json.dumps({"counts": counts, "times": case.turn(calls)}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
