"""Rehearsals of calls, for softmax and linear attention.

A rehearsal finds the tables of a call before it begins (`core/device_tables.py`), without messages.
A `Preparation` rehearses a module's calls ahead of time, in any process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.comm.messages.header import Message
from seqpar.core.arguments import as_bool, as_int, shown
from seqpar.core.device_tables import UploadedTables, rehearse
from seqpar.core.dtypes import DTYPES
from seqpar.core.memo import LOCAL, Memo
from seqpar.kernels.gpus import Gpu, assume, gpu_of
from seqpar.layout.layout import Layout


class SilentComm(Comm):
    """The ranks of a group, without messages."""

    def __init__(self, rank: int, size: int, is_routed: bool) -> None:
        super().__init__("silent", rank, size)
        self._is_routed = is_routed

    @property
    def is_routed(self) -> bool:
        return self._is_routed

    def exchange(
        self, sends: Iterable[Message], recvs: Iterable[Message], *, label: str, step: int = 0
    ) -> Pending:
        return Pending([], [])

    def channel(self, name: str) -> Comm:
        return self


class RehearsableCall(NamedTuple):
    """A call whose tables a rehearsal finds, once for all calls that differ only in tensors."""

    memo: Memo  # keeps the tables with the layout
    key: tuple[Hashable, ...]  # everything but the passes on which the tables depend
    run: Callable[[bool], None]  # runs forward, and with True backward, on meta tensors

    def tables(self, device: torch.device, backward: bool) -> list[Tensor]:
        """Return the tables of forward, and with `backward` of backward, on the CPU."""

        def build() -> list[Tensor]:
            with rehearse(device) as rehearsal:
                self.run(backward)
            return list(rehearsal.tables.values())

        return self.memo(("tables", *self.key, backward), build)


def upload_once(call: RehearsableCall, device: torch.device, backward: bool) -> bool:
    """Copy the tables of a call to a device, with those of backward if they are prepared.

    Returns whether they have those of backward.
    """
    if not backward:  # in compiled code, tensors do not say that they will be differentiated
        backward = ("tables", *call.key, True) in call.memo
    build = lambda: UploadedTables(call.tables(device, backward), device)  # noqa: E731
    call.memo((LOCAL, "uploaded tables", *call.key, backward), build).wait()
    return backward


@dataclass(frozen=True, kw_only=True)
class Preparation(ABC):
    """Builds the tables of one kind of call ahead of time.

    It can be pickled and called in any process: `preparation(layout)` builds the tables of the
    layout, and returns the layout.
    """

    # rank, ranks, is_routed: the module's place in its group, and whether it relays messages
    rank: int
    ranks: int
    is_routed: bool
    shape: OperandShape  # the dtype and sizes of the operands
    backend: str
    backward: bool  # whether the calls have a backward
    # device, gpu: the device of the operands, and the facts about it if it is a GPU
    device: torch.device
    gpu: Gpu | None

    def __call__(self, layout: Layout) -> Layout:
        """Build the tables of a layout, which keeps them and takes them along when it is pickled.

        Raise a ValueError if the call would be refused with this layout.
        """
        if not isinstance(layout, Layout):
            raise ValueError(f"layout must be a seqpar.Layout, got {shown(layout)}")
        if self.gpu is not None:
            assume(self.device, self.gpu)
        self._build(SilentComm(self.rank, self.ranks, self.is_routed), layout)
        return layout._with_tables()

    @abstractmethod
    def _build(self, comm: Comm, layout: Layout) -> None:
        """Build the tables, after the checks of a call."""


def described_call(
    bound: BoundStrategy[Any],
    dtype: torch.dtype,
    device: torch.device | str | None,
    backward: bool,
    **sizes: int,
) -> dict[str, Any]:
    """Return all fields of a `Preparation` but its backend; `sizes` are an `OperandShape`'s.

    Raise a ValueError that names a wrong argument.
    """
    counts = {name: as_int(name, size, 1) for name, size in sizes.items()}
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {shown(dtype)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        device = device if bound.comm.sends_from(torch.device(device)) else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return {
        "rank": bound.comm.rank,
        "ranks": bound.comm.size,
        "is_routed": bound.routing is not None,
        "shape": OperandShape(dtype, **counts),
        "backward": as_bool("backward", backward),
        "device": device,
        "gpu": gpu_of(device) if device.type == "cuda" else None,
    }
