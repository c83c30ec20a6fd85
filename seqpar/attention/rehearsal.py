"""Find the tables of a call before the call begins, and send them to the device in one copy.

*Tables* are small tensors that strategies and kernels read, such as the indices of the rows to
send. A *rehearsal* runs the code of a strategy on meta tensors to find the tables that it needs
(`core/device_tables.py`). Nothing is computed or sent. A `Preparation` rehearses the calls of a
module ahead of time, in any process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Message
from seqpar.core.arguments import as_bool, as_device, as_int, shown
from seqpar.core.compiling import outside_graphs
from seqpar.core.device_tables import UploadedTables, rehearse
from seqpar.core.dtypes import DTYPES
from seqpar.core.hooks import hooks
from seqpar.core.memo import LOCAL, Memo
from seqpar.kernels.gpus import Gpu, assume, gpu_of
from seqpar.layout.geometry import Geometry
from seqpar.layout.layout import Layout
from seqpar.layout.replaced import remember


class SilentComm(Comm):
    """Replaces the Comm of a group while a call runs on meta tensors. It has the ranks of the
    group, and sends no messages.
    """

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


class RehearsableCall(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def layout(self) -> Geometry: ...

    @property
    def kept(self) -> Memo:
        """The cache in which the layout stores tables, small tensors of indices."""

    @property
    def variant(self) -> tuple[Hashable, ...]:
        """All values on which the tables of indices of a call depend, except for the strategy and
        the layout.
        """


class Rehearsing(Protocol):
    @property
    def rehearses(self) -> bool: ...

    def rehearse(self, comm: Comm, call: Any, backward: bool) -> None:
        """Run a call on meta tensors, to find the tables of indices that the call needs.

        If `backward` is True, backward is run too.
        """


def upload_tables(
    strategy: Rehearsing, comm: Comm, call: RehearsableCall, device: torch.device, backward: bool
) -> None:
    """Copy the tables of a call to a device in one copy. Tables are small tensors of indices.

    The tables of forward are always copied. The tables of backward are copied if `backward` is
    True, or if they already exist. Nothing is copied if an earlier call with the same layout and
    arguments has copied the tables.
    """
    if device.type == "cpu" or hooks().replace_compute is not None:
        return
    if not strategy.rehearses:  # its tables are copied when first needed, on any stream
        UploadedTables((), device).wait()
        return
    key = _key(strategy, comm, call, device)
    if not backward:  # compiled code calls this without knowing whether backward will follow
        backward = ("tables", *key, True) in call.kept

    def build() -> UploadedTables:
        return UploadedTables(tables_of(strategy, comm, call, device, backward), device)

    call.kept((LOCAL, "uploaded tables", *key, backward), build).wait()
    if call.layout.cut.most_documents:
        remembered = LOCAL, "remembered", *key, backward
        call.kept(remembered, lambda: _remember(strategy, comm, call, device, backward))


def tables_of(
    strategy: Rehearsing, comm: Comm, call: RehearsableCall, device: torch.device, backward: bool
) -> list[Tensor]:
    """Return the tables of a call, on the CPU. Tables are small tensors of indices.

    The result has the tables of forward and, if `backward` is True, the tables of backward. They
    are also stored with the layouts of the call.
    """

    def build() -> list[Tensor]:
        with rehearse(device) as rehearsal:
            silent = SilentComm(call.rank, call.ranks, comm.is_routed)
            strategy.rehearse(silent, call, backward)
        return list(rehearsal.tables.values())

    return call.kept(("tables", *_key(strategy, comm, call, device), backward), build)


def _key(
    strategy: Rehearsing, comm: Comm, call: RehearsableCall, device: torch.device
) -> tuple[Hashable, ...]:
    return strategy, comm.is_routed, device, *call.variant  # type: ignore[arg-type]


def _remember(
    strategy: Rehearsing, comm: Comm, call: Any, device: torch.device, backward: bool
) -> None:
    """Store a function that builds the tables of this call again. `Layout.load_tables` calls the
    function after it has put different documents into a layout.
    """
    # otherwise the layout's cache would refer to the layout
    without_documents = call.without_documents()
    silent = SilentComm(comm.rank, comm.size, comm.is_routed)

    def tables(layout: Geometry) -> list[Tensor]:
        of_layout = without_documents.altered(layout=layout, kv_layout=layout)
        return tables_of(strategy, silent, of_layout, device, backward)

    remember(call.layout, device, tables)


@dataclass(frozen=True, kw_only=True)
class Preparation(ABC):
    """A function that builds the tables of one kind of call ahead of time. Tables are small tensors
    of indices.

    It can be pickled and called in any process. `preparation(layout)` builds the tables of the
    layout, and returns the layout.
    """

    # The module's rank, the number of ranks, and whether the group relays messages.
    rank: int
    ranks: int
    is_routed: bool
    strategy: Rehearsing
    shape: OperandShape  # the dtype and sizes of the operands
    backend: str
    backward: bool  # whether the calls have a backward
    # The device of the operands and, for a GPU, its properties.
    device: torch.device
    gpu: Gpu | None

    @outside_graphs
    def __call__(self, layout: Layout) -> Layout:
        """Build the tables of indices of a layout, store them in the layout, and return the layout.

        The tables are pickled with the layout. Raises a ValueError if a call with this layout would
        be refused.
        """
        if not isinstance(layout, Layout):
            raise ValueError(f"layout must be a seqpar.Layout, got {shown(layout)}")
        if self.gpu is not None:
            assume(self.device, self.gpu)
        comm = SilentComm(self.rank, self.ranks, self.is_routed)
        tables_of(self.strategy, comm, self._call(comm, layout), self.device, self.backward)
        return layout._with_tables()

    @abstractmethod
    def _call(self, comm: Comm, layout: Layout) -> RehearsableCall:
        """Return the resolved call, which has passed all checks."""


def described_call(
    bound: BoundStrategy[Any],
    dtype: torch.dtype,
    device: torch.device | str | None,
    backward: bool,
    **sizes: int,
) -> dict[str, Any]:
    """Return, by name, the fields of a `Preparation` that all kinds of attention have. `sizes` are
    sizes of q, k and v.

    If an argument is wrong, a ValueError names it.
    """
    counts = {
        name: as_int("head_dim" if name == "dim" else name, size, 1, 2**31 - 1)
        for name, size in sizes.items()
    }
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {shown(dtype)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        device = device if bound.comm.sends_from(torch.device(device)) else "cpu"
    device = as_device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return {
        "rank": bound.comm.rank,
        "ranks": bound.comm.size,
        "is_routed": bound.routing is not None,
        "strategy": bound.strategy,
        "shape": OperandShape(dtype, **counts),
        "backward": as_bool("backward", backward),
        "device": device,
        "gpu": gpu_of(device) if device.type == "cuda" else None,
    }
