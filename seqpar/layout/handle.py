"""Pass a geometry through an operator as a tensor.

An operator takes tensors, numbers and strings, but no Python objects. A handle is an int64 scalar
on the CPU that names a geometry. A compiled graph takes it as data: the graph neither specialises
on a layout nor recompiles for the next one.

Lifetime: the handle's storage is a numpy array that refers to its geometry, so whatever keeps the
tensor (a Layout, or autograd's saved tensors) keeps the geometry. The table from numbers to
geometries holds them weakly. A backward may therefore outlive the layout its forward was called
with, and when both are gone the geometry is freed with all that was derived from it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from seqpar.layout.geometry import Geometry

_counter = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Geometry] = weakref.WeakValueDictionary()


class _OwningArray(np.ndarray[Any, Any]):
    """An array that keeps a geometry alive."""

    geometry: Geometry


def make_handle(geometry: Geometry) -> Tensor:
    """Return a tensor that names the geometry and keeps it alive."""
    number = next(_counter)
    _by_number[number] = geometry
    array = np.full((), number, dtype=np.int64).view(_OwningArray)
    array.geometry = geometry
    return torch.from_numpy(array)


def from_handle(handle: Tensor) -> Geometry:
    """Return the geometry that a handle names."""
    return _by_number[int(handle)]
