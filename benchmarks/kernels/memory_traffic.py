"""Count what a strategy does around its attention kernels on a GPU, without a GPU.

One rank of 8 runs the default path of a strategy on meta tensors, which have no data. Stand-ins
take the place of FlashAttention-4, of the launches of Triton kernels, and of the other ranks. The
second call of a layout is counted: the first call also builds tables and copies them to the device.
No time is measured, so the same code gives the same figures on every machine.

Figures of a pass, forward or backward:

* attention calls: calls of FlashAttention-4; and *calls per head*, the number of these calls in
  which a query head takes part, on average over the heads that the rank computes;
* other kernels: operators of ATen that run on the device, and launches of Triton kernels. Views and
  allocations launch nothing;
* bytes: what the other kernels read and write;
* extra time: the time of these bytes at the assumed memory bandwidth, as a share of the time of
  attention at the assumed rate;
* allocations: requests to the allocator, without those of FlashAttention-4;
* message buffers: distinct allocations in which messages arrive;
* sent bytes: the bytes that this rank sends to other ranks;
* host waits: operators in which the host waits for the device.
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from seqpar.kernels.flash_attention import launching
from seqpar.kernels.gpus import Gpu, assume
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks import harness
from seqpar import Layout, make_attention
from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Message
from seqpar.core.torch_private import dispatch_mode, memory_of
from seqpar.simulate.recording.operators import operator_cost
from seqpar.softmax.backends import flash_attn
from seqpar.softmax.backends.flash_attn import load_package
from seqpar.softmax.softmax_operator import ATTENTION

GPU = Gpu("NVIDIA H200", 9, 132)
BANDWIDTH = 3.0e12  # bytes per second
RATES = {"forward": 650e12, "backward": 500e12}  # FLOP/s of attention
RANK, RANKS, MESH = 3, 8, (2, 4)
TOKENS = 2**14  # per rank
HEADS, KV_HEADS, DIM = 32, 8, 128
META = torch.device("meta")

_aten = torch.ops.aten
_READ = {_aten._local_scalar_dense, _aten.nonzero}  # the host reads a number of the device


class Case(NamedTuple):
    """A strategy's call."""

    strategy: str
    documents: int
    options: dict[str, Any] = {}  # noqa: RUF012
    heads: int = HEADS  # query heads that a rank computes


CASES = {
    **{
        f"{strategy}, {documents} document{'s' if documents > 1 else ''}": Case(
            strategy, documents, {}, heads
        )
        for strategy, heads in {
            "ring": HEADS,
            "all_gather": HEADS,
            "ulysses": HEADS // RANKS,
            "usp": HEADS // MESH[1],
            "mesh": HEADS,
            "token_ring": HEADS,
            "disaggregated": HEADS,
        }.items()
        for documents in (1, 32)
    },
    "ring, 1 document, fp8 messages": Case("ring", 1, {"message_dtype": torch.float8_e4m3fn}),
    "mesh, 1 document, bf16 gradients": Case("mesh", 1, {"gradient_dtype": torch.bfloat16}),
}


def layout_of(documents: int) -> Layout:
    """Return a zigzag layout of documents whose lengths differ by a factor of up to 32."""
    lengths = np.random.default_rng(0).integers(1, 33, documents)
    edges = np.r_[0, np.cumsum(lengths)] * (TOKENS * RANKS) // lengths.sum()
    return Layout.zigzag(edges, RANKS)


@dataclass
class Counts:
    """What a pass does; see the module's docstring."""

    attention_calls: int = 0
    calls_per_head: float = 0.0
    kernels: int = 0
    bytes: int = 0
    extra_time: float = 0.0  # relative to the time of attention
    allocations: int = 0
    message_buffers: int = 0
    sent_bytes: int = 0
    host_waits: int = 0
    by_kernel: dict[str, int] = field(default_factory=dict)  # the bytes, by the kernel's name


class Counter(dispatch_mode()):  # type: ignore[misc]
    """Counts the device's work within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self._stand_in_runs = False
        # Storages are kept alive, so that no other one gets the same address.
        self._allocated: dict[int, torch.UntypedStorage] = {}
        self._received: dict[int, torch.UntypedStorage] = {}

    def __enter__(self) -> Counter:
        global _counter
        _counter = self
        super().__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        global _counter
        _counter = None
        super().__exit__(*fault)

    def __torch_dispatch__(
        self, operator: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        inputs, results = _tensors((args, kwargs)), _tensors(result)
        devices = {x.device.type for x in (*inputs, *results)}
        if "meta" not in devices or self._stand_in_runs:
            return result
        if len(devices) > 1 or operator.overloadpacket in _READ:
            self.counts.host_waits += 1
        inputs, results = ([x for x in each if x.is_meta] for each in (inputs, results))
        known = {*map(memory_of, inputs), *self._allocated}
        new = {memory_of(x): x.untyped_storage() for x in results if memory_of(x) not in known}
        self._allocated |= new
        self.counts.allocations += sum(x.nbytes() > 0 for x in new.values())
        if not (operator.is_view and not new):
            cost = operator_cost(operator, args, kwargs, result, inputs, results)
            if cost.bytes:
                self.kernel(operator._schema.name.removeprefix("aten::"), cost.bytes)
        return result

    def kernel(self, name: str, size: int) -> None:
        """Count a kernel other than attention that reads and writes `size` bytes."""
        self.counts.kernels += 1
        self.counts.bytes += size
        self.counts.by_kernel[name] = self.counts.by_kernel.get(name, 0) + size

    @contextmanager
    def attention(self, heads: int) -> Iterator[None]:
        """Count a call of attention, whose stand-in runs in the context."""
        self.counts.attention_calls += 1
        self.counts.calls_per_head += heads
        self._stand_in_runs = True
        try:
            yield
        finally:
            self._stand_in_runs = False

    def messages(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Count the messages of an exchange."""
        self.counts.sent_bytes += sum(x.nbytes for _, x in sends)
        self._received |= {memory_of(x): x.untyped_storage() for _, x in recvs}
        self.counts.message_buffers = len(self._received)


def _tensors(x: object) -> list[Tensor]:
    return [x for x in tree_leaves(x) if isinstance(x, Tensor)]


_counter: Counter | None = None  # of the pass that is counted


class CountedComm(Comm):
    """One rank without its peers: it counts messages, and all of them have arrived."""

    _names = itertools.count()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(f"counted{next(self._names)}", rank, size)

    def start(self, sends: list[Message], recvs: list[Message], exchange: object) -> Pending:
        if _counter is not None:
            _counter.messages(sends, recvs)
        return Pending([], [])


def _merge_bytes(launch: launching.Prepared, *tensors: Tensor) -> int:
    *of_hops, partial_out, partial_lse, out, lse, _ = tensors
    hops = launch.arguments[2]
    read = [x for first in (0, 8, 16) for x in of_hops[first : first + hops]]
    share = read[0].shape[1] / out.shape[1] if launch.flags["ONLY_ROWS"] else 1
    written = [out, lse, *([partial_out, partial_lse] if launch.flags["HAS_PARTIAL"] else [])]
    return sum(x.nbytes for x in read) + int(share * sum(x.nbytes for x in written))


def _add_to_rows_bytes(_: launching.Prepared, part: Tensor, total: Tensor, index: Tensor) -> int:
    return part.nbytes + 2 * part.numel() * total.itemsize + index.nbytes


def _delta_bytes(
    _: launching.Prepared, out: Tensor, dout: Tensor, dlse: Tensor, result: Tensor
) -> int:
    return sum(x.nbytes for x in (out, dout, result)) + (0 if dlse is result else dlse.nbytes)


def _encode_bytes(
    launch: launching.Prepared, first: Tensor, second: Tensor, index: Tensor, message: Tensor
) -> int:
    rows = message.shape[:3].numel()
    read = rows * sum(launch.flags[name] for name in ("D", "DV")) * first.itemsize
    return read + message.nbytes + (index.nbytes if launch.flags["INDEXED"] else 0)


def _decode_bytes(
    launch: launching.Prepared, message: Tensor, first: Tensor, second: Tensor
) -> int:
    written = first.nbytes + (second.nbytes if launch.flags["DV"] else 0)
    return message.nbytes + written


# For each Triton kernel, by name, a function of a launch and its tensors that returns the bytes
# that the launch reads and writes. A kernel without an entry ends the program.
KERNEL_BYTES: dict[str, Callable[..., int]] = {
    "flash_add_to_rows": _add_to_rows_bytes,
    "flash_decode_rows": _decode_bytes,
    "flash_delta": _delta_bytes,
    "flash_encode_rows": _encode_bytes,
    "flash_merge_hops": _merge_bytes,
}


def _launch(launch: launching.Prepared, tensors: tuple[Any, ...]) -> None:
    """Stand for `launching._run`."""
    name = launch.kernel.__name__
    if _counter is not None:
        _counter.kernel(name, KERNEL_BYTES[name](launch, *tensors))


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, softmax_scale: float, causal: bool,
    softcap: float, window_size_left: int | None, window_size_right: int | None, return_lse: bool,
    score_mod: object = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    *batch, rows, heads, _ = q.shape  # of segments of equal lengths, or of all segments
    with _attention(q):
        lse = q.new_empty((*batch, heads, rows), dtype=torch.float32)
        return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int | None,
    max_seqlen_k: int | None, softmax_scale: float, causal: bool, softcap: float,
    window_size_left: int | None, window_size_right: int | None, deterministic: bool,
    dlse: Tensor | None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, score_mod: object = None, score_mod_bwd: object = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    with _attention(q):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _no_softcap(softcap_val: float) -> object:
    """Take the place of the package's functions for a softcap. No case has a softcap."""
    raise NotImplementedError


@contextmanager
def _attention(q: Tensor) -> Iterator[None]:
    if _counter is None:
        yield
    else:
        with _counter.attention(q.shape[-2]):
            yield


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let meta tensors pass for tensors on an H200 with FlashAttention-4."""
    package = ModuleType("flash_attn.cute.interface")
    utils = SimpleNamespace(
        create_softcap_scoremod=_no_softcap, create_softcap_scoremod_bwd=_no_softcap
    )
    functions = {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd}
    vars(package).update(functions, utils=utils)
    is_cuda = property(lambda x: x.device.type in ("cuda", "meta"))
    assume(META, GPU)
    load_package.cache_clear()
    # Not `mock.patch.dict`, which would also remove the modules that torch imports in the context.
    sys.modules[package.__name__] = package
    with (
        mock.patch.object(torch.Tensor, "is_cuda", is_cuda),
        mock.patch.object(launching, "_run", _launch),
        mock.patch.object(flash_attn, "installed_version", return_value="4.0.0b36"),
    ):
        try:
            yield
        finally:
            del sys.modules[package.__name__]
            load_package.cache_clear()


def count(case: Case, **options: Any) -> dict[str, Counts]:
    """Return the counts of forward and backward, in the second call of the case's layout.

    The call is causal unless its `options` say otherwise.
    """
    comm = CountedComm(RANK, RANKS)
    if case.strategy in ("mesh", "usp"):
        comm.shape = MESH
    attention: Any = make_attention(case.strategy, comm, **case.options)
    layout = layout_of(case.documents)
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": META}
    rows = 1, layout.tokens_on(RANK)
    q, k, v = (
        torch.empty(*rows, heads, DIM, requires_grad=True, **made)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    dout = torch.empty(*rows, HEADS, DIM, **made)
    with stand_ins(), torch.no_grad():
        _call(attention, layout, (q, k, v, dout), dict.fromkeys(RATES, nullcontext()), options)
        counters = {name: Counter() for name in RATES}
        flops = _call(attention, layout, (q, k, v, dout), counters, options)
    for name, counter in counters.items():
        counts = counter.counts
        counts.calls_per_head /= case.heads
        counts.extra_time = counts.bytes / BANDWIDTH * RATES[name] / flops[name]
    return {name: counter.counts for name, counter in counters.items()}


def _call(
    attention: Any,
    layout: Layout,
    tensors: Sequence[Tensor],
    within: Mapping[str, AbstractContextManager[object]],
    options: Mapping[str, Any],
) -> dict[str, int]:
    """Call the operators below autograd, each within a context. Return the FLOPs of attention."""
    *operands, dout = tensors
    options = {"causal": True, **options}
    inputs, arguments, _ = attention._operator_inputs(*operands, layout, **options)
    carried = ATTENTION.arguments.flat(arguments)
    with within["forward"]:
        out, lse, numbers, *kept = ATTENTION._forward(*inputs, *carried)
    saved = ATTENTION.save(attention._bound, inputs, arguments, [out, lse], kept)
    given = [x is not None for x in saved.tensors]
    flops = {
        "forward": ATTENTION.flops(inputs, arguments),
        "backward": ATTENTION.backward_flops(arguments, saved),
    }
    held = [x.detach() for x in saved.tensors if x is not None]
    with within["backward"]:
        ATTENTION._backward(dout, None, held, given, saved.sizes, numbers, *carried)
    return flops


def measure(options: Namespace) -> dict[str, Any]:
    rows = {}
    for name, case in CASES.items():
        rows[name] = {direction: asdict(x) for direction, x in count(case).items()}
    print(table(rows))
    assumed = {"gpu": GPU.name, "bytes_per_second": BANDWIDTH, "flops_per_second": RATES}
    return {"assumed": assumed, "rows": rows}


def table(rows: dict[str, Any]) -> str:
    """Return the table of docs/benchmarks/kernels.md."""
    lines = []
    for name, row in rows.items():
        cells = [
            " / ".join(form(row[direction]) for direction in RATES) for form in COLUMNS.values()
        ]
        lines.append([name, *cells])
    return harness.table(["forward / backward", *COLUMNS], lines)


# By the head of a column: its cell for the figures of a pass.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "attention calls": lambda x: f"{x['attention_calls']}",
    "calls per head": lambda x: f"{x['calls_per_head']:.3g}",
    "other kernels": lambda x: f"{x['kernels']}",
    "GB": lambda x: f"{x['bytes'] / 1e9:.1f}",
    "extra time, %": lambda x: f"{100 * x['extra_time']:.{1 if x['extra_time'] < 0.1 else 0}f}",
    "allocations": lambda x: f"{x['allocations']}",
    "message buffers": lambda x: f"{x['message_buffers']}",
    "sent GB": lambda x: f"{x['sent_bytes'] / 1e9:.2f}",
    "host waits": lambda x: f"{x['host_waits']}",
}

if __name__ == "__main__":
    harness.run("memory-traffic", __doc__, {}, measure, canary_is="none")
