"""Replace the tables of a layout's calls on GPUs by those of another layout, for CUDA graphs.

A graph keeps the addresses of the tables that its calls read. A layout with `most_documents`
therefore remembers its calls, and how to find the tables of the same calls for other documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.device_tables import new_copies, on_device
from seqpar.core.memo import LOCAL
from seqpar.layout.geometry import Geometry

_LOADED = LOCAL, "tables were replaced"


class _Call(NamedTuple):
    device: torch.device
    tables: list[Tensor]  # on the CPU; while they are alive, so are their copies on the device
    tables_of: Callable[[Geometry], list[Tensor]]  # for other documents


def remember(
    layout: Geometry, device: torch.device, tables_of: Callable[[Geometry], list[Tensor]]
) -> None:
    """Remember a call whose tables are on a device; `tables_of` returns them for any layout.

    A kind of call that is new after `load_tables` would read tables of both layouts.
    """
    if _LOADED in layout.derived:
        raise ValueError(
            "layout must have had such a call before load_tables, which replaces tables"
        )
    _calls(layout).append(_Call(device, tables_of(layout), tables_of))


def load_tables(layout: Geometry, other: Geometry) -> None:
    """Copy another layout's tables over those that calls of a layout have on devices."""
    calls = _calls(layout)
    if not calls:
        raise ValueError("layout must have had a call on a GPU, which copies its tables there")
    for device in {call.device for call in calls}:
        pairs = dict[int, tuple[Tensor, Tensor]]()  # calls share tables
        for call in (x for x in calls if x.device == device):
            for table, loaded in zip(call.tables, call.tables_of(other), strict=True):
                if table.shape != loaded.shape:
                    shapes = tuple(table.shape), tuple(loaded.shape)
                    raise ValueError("other must have tables of {}, got {}".format(*shapes))
                pairs[id(table)] = table, loaded
        layout.derived(_LOADED, lambda: True)
        tables, loaded_tables = zip(*pairs.values(), strict=True)
        # Not copies that the other layout already has: these may have been replaced too.
        copies = new_copies(loaded_tables, device)
        for table, copy in zip(tables, copies, strict=True):
            on_device(table, device).copy_(copy)


def _calls(layout: Geometry) -> list[_Call]:
    return layout.derived((LOCAL, "calls on devices"), list)
