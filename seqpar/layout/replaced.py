"""Replace a layout's tables on GPUs with the tables of another layout, for CUDA graphs.

A CUDA graph reads tables at fixed addresses. For each call, a layout with `most_documents`
therefore stores a function that makes the tables of the call for a different layout.
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
    tables: list[Tensor]  # tables on the CPU; copies on the device live as long as these
    # Returns the tables of this call for another layout.
    tables_of: Callable[[Geometry], list[Tensor]]


def remember(
    layout: Geometry, device: torch.device, tables_of: Callable[[Geometry], list[Tensor]]
) -> None:
    """Remember a call whose tables are on a device. A *table* is a tensor that the call's kernels
    read.

    `tables_of` returns the tables of the call for any layout. Raises a ValueError if the tables of
    another layout are loaded into `layout`, because the new call would read tables of different
    documents than earlier calls.
    """
    if _LOADED in layout.derived:
        raise ValueError(
            "layout must have had a call with the same options before load_tables, which replaces "
            "only the tables of earlier calls: first make one call with each set of options"
        )
    _calls(layout).append(_Call(device, tables_of(layout), tables_of))


def load_tables(layout: Geometry, other: Geometry) -> None:
    """Copy the tables of another layout over the tables that a layout's calls read on devices."""
    calls = _calls(layout)
    if not calls:
        raise ValueError(
            "layout must have had a call on a GPU, whose tables load_tables replaces, got none"
        )
    for device in {call.device for call in calls}:
        pairs = dict[int, tuple[Tensor, Tensor]]()  # by id, because calls may share tables
        for call in (x for x in calls if x.device == device):
            for table, loaded in zip(call.tables, call.tables_of(other), strict=True):
                if table.shape != loaded.shape:
                    shapes = tuple(table.shape), tuple(loaded.shape)
                    raise ValueError("other must have tables of shape {}, got {}".format(*shapes))
                pairs[id(table)] = table, loaded
        layout.derived(_LOADED, lambda: True)
        tables, loaded_tables = zip(*pairs.values(), strict=True)
        # Copies of tables that the other layout already has on the device are not used, because
        # `load_tables` may have overwritten them.
        copies = new_copies(loaded_tables, device)
        for table, copy in zip(tables, copies, strict=True):
            on_device(table, device).copy_(copy)


def _calls(layout: Geometry) -> list[_Call]:
    return layout.derived((LOCAL, "calls on devices"), list)
