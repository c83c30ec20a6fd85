"""Tables that the host builds, and their copies on devices.

A copy from pageable memory makes the host wait for the device. All tables of an attention call are
therefore copied together, from pinned memory. A *rehearsal* finds the tables before an attention
call. The rehearsal runs the code of the call on meta tensors. When the code requests a table, the
rehearsal collects the table and does not copy it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from seqpar.core.memo import LOCAL, Memo

T = TypeVar("T")

_ALIGNMENT = 16  # bytes, because kernels read tables in vectors
# for each device and stream, its last copy
_copied: dict[torch.device, dict[torch.cuda.Stream, torch.cuda.Event]] = {}
# copies of tables that are alive, by the id of the table and its device
_copies: dict[tuple[int, torch.device], Tensor] = {}
_pinned: dict[int, Tensor] = {}  # pinned copies of memory that is alive, by its address


@dataclass
class Rehearsal:
    device: torch.device  # the device for which meta tensors of the rehearsal stand
    tables: dict[int, Tensor] = field(default_factory=dict)  # the requested tables, by id


class _State(threading.local):
    rehearsal: Rehearsal | None = None


_state = _State()


@contextmanager
def rehearse(device: torch.device) -> Iterator[Rehearsal]:
    """Within this context, collect the tables that this thread requests for a device, instead of
    copying them. Tables are small tensors, such as indices.
    """
    _state.rehearsal = rehearsal = Rehearsal(device)
    try:
        yield rehearsal
    finally:
        _state.rehearsal = None


def rehearsing() -> bool:
    """Return whether this thread runs a rehearsal, which collects tables and computes nothing."""
    return _state.rehearsal is not None


def device_of(x: Tensor) -> torch.device:
    """Return the device of a tensor. For a meta tensor of a rehearsal, which only collects tables,
    return the device for which tables are collected.
    """
    return x.device if _state.rehearsal is None else _state.rehearsal.device


def is_on_cuda(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU, or is a meta tensor of a rehearsal for a GPU. A
    rehearsal collects tables and computes nothing.
    """
    return x.is_cuda if _state.rehearsal is None else _state.rehearsal.device.type == "cuda"


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Return the copy of a constant CPU table on a device. The copy is made in the first call, and
    is freed with the table.
    """
    if _state.rehearsal is not None:
        _state.rehearsal.tables[id(table)] = table
        return torch.empty(table.shape, dtype=table.dtype, device="meta")
    if device.type == "cpu":
        return table
    if (copy := _copies.get((id(table), device))) is None:
        upload([table], device)
        copy = _copies[id(table), device]
    return copy


class UploadedTables:
    """Tables that were copied to a device together, so that a call on a different stream can wait
    for the copy.
    """

    def __init__(self, tables: Sequence[Tensor], device: torch.device) -> None:
        self._device, self.copied = device, upload(tables, device)
        # Other calls may have copied some of the tables already.
        copies = (_copies[id(x), device] for x in tables if device.type != "cpu")
        self._memories = list({x.untyped_storage().data_ptr(): x for x in copies}.values())
        self._events = dict(_copied.get(device, {}))

    def wait(self) -> None:
        """Make the current stream wait until the tables are copied."""
        if not self._events or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._device)
        others = [event for stream, event in self._events.items() if stream != current]
        for event in others:
            current.wait_event(event)
        for memory in self._memories if others else ():
            memory.record_stream(current)  # this stream may read it after the layout is freed


class TableHolder:
    """The base class of plans. The attributes of a plan are tables, which are small CPU tensors, or
    tuples and lists of tables.
    """

    def placed(self, place: Callable[[Tensor], Tensor]) -> Self:
        """Return this plan with each table x replaced by `place(x)`."""
        copied = copy(self)
        vars(copied).update({name: placed(x, place) for name, x in vars(self).items()})
        return copied


def placed(plan: T, place: Callable[[Tensor], Tensor]) -> T:
    """Return a plan with each table x replaced by `place(x)`.

    Tables may be in tuples, lists, and objects that have the method `placed` of `TableHolder`.
    """
    copied: Any = plan
    if isinstance(plan, Tensor):
        copied = place(plan)
    elif hasattr(plan, "placed"):
        copied = plan.placed(place)
    elif isinstance(plan, list | tuple):
        items = [placed(x, place) for x in plan]
        copied = plan._make(items) if hasattr(plan, "_make") else type(plan)(items)
    return copied


def kept_on(
    device: torch.device, memo: Memo, key: tuple[Hashable, ...], build: Callable[[], T]
) -> T:
    """Call `build`, which returns a plan with tables on the CPU, and return the plan with its
    tables on a device.

    The result is cached under the key.
    """
    if device.type == "cpu":
        return memo(key, build)
    if rehearsing():
        return placed(memo(key, build), lambda table: on_device(table, device))

    def place() -> tuple[UploadedTables, T]:
        plan, tables = memo(key, build), list[Tensor]()

        def note(table: Tensor) -> Tensor:
            tables.append(table)
            return table

        placed(plan, note)
        uploaded = UploadedTables(tables, device)  # all in one copy
        return uploaded, placed(plan, lambda table: on_device(table, device))

    uploaded, plan = memo((LOCAL, *key, device), place)
    if uploaded.copied:  # otherwise the call has waited already
        uploaded.wait()
    return plan


def on_stream(
    device: torch.device, memo: Memo, key: tuple[Hashable, ...], compute: Callable[[], T]
) -> T:
    """Return the tensors that `compute` returns, from a cache if possible. The tensors are on a
    device.

    The cache has an entry for each key and each stream of the device. While a CUDA graph is
    captured, nothing is cached.
    """
    if device.type != "cuda":
        return memo(key, compute)
    if torch.cuda.is_current_stream_capturing():
        # A tensor that is made during a capture has no values until the graph is replayed.
        return compute()
    return memo((*key, torch.cuda.current_stream(device)), compute)


@torch.inference_mode(False)  # autograd cannot save tensors that inference mode makes
def upload(tables: Iterable[Tensor], device: torch.device) -> bool:
    """Copy those tables to a device that are not on the device yet, in one transfer. The host does
    not wait for the transfer.

    Return whether any table was copied.
    """
    missing = [x for x in tables if (id(x), device) not in _copies]
    if device.type == "cpu" or not missing:
        return False
    for x, on_the_device in zip(missing, new_copies(missing, device), strict=True):
        key = id(x), device
        _copies[key] = on_the_device
        weakref.finalize(x, _copies.pop, key, None).atexit = False
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        _copied.setdefault(device, {})[stream] = stream.record_event()
    return True


def new_copies(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy one or more tables to a device in one transfer, without waiting for the transfer, and
    return the copies.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        reason = "the first call copies tables to the GPU, and a graph would copy only in a replay"
        raise RuntimeError(
            "layout must have had a call with the same options before a CUDA graph captures the "
            f"call: {reason}"
        )
    addresses = {x.untyped_storage().data_ptr() for x in tables}
    packed = _pinned.get(addresses.pop()) if len(addresses) == 1 else None
    if packed is not None:
        starts = [int(x.storage_offset()) * x.itemsize for x in tables]
    else:
        sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tables]
        # Memory is made from a table, because simulations skip operators on host tensors.
        pins = device.type == "cuda"
        packed = tables[0].new_empty(sum(sizes), dtype=torch.uint8, pin_memory=pins)
        starts = list(accumulate(sizes, initial=0))
        for start, x in zip(starts, tables, strict=False):
            _view(packed, start, x).copy_(x)
    memory = packed.to(device, non_blocking=True)
    return [_view(memory, start, x) for start, x in zip(starts, tables, strict=False)]


def pin(memory: Tensor, size: int) -> None:
    """Make a pinned copy of the first `size` bytes of a tensor (n,) uint8 that contains tables.

    If these bytes contain all tables of a later call of `upload`, this call copies the pinned bytes
    to the device directly.
    """
    if not size or (address := memory.data_ptr()) in _pinned:
        return
    _pinned[address] = memory[:size].pin_memory()
    weakref.finalize(memory, _pinned.pop, address, None).atexit = False


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
