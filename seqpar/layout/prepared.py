"""Pack the tables of a layout, to send them to another process.

All arrays of the tables are packed into one tensor. Processes can share the memory of a tensor, so
unpickling copies nothing.
"""

from __future__ import annotations

import io
import math
import pickle
import weakref
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.core.memo import Memo
from seqpar.layout.geometry import Geometry

_ALIGNMENT = 64  # bytes
_GEOMETRY = -1  # stands for the geometry itself
# Whether the table is a tensor, its first byte, its dtype, its shape.
_Place = tuple[bool, int, Any, tuple[int, ...]]


def pack(geometry: Geometry) -> tuple[bytes, Tensor, int] | None:
    """Return the tables of a layout for another process, or None if a table cannot be pickled.

    A table on a GPU, for example, cannot be pickled. The result has a pickle, a tensor (n,) uint8
    with the contents of all arrays, and the number of bytes at the start of this tensor that belong
    to torch tensors. The contents of numpy arrays follow.
    """
    file = io.BytesIO()
    packer = _Packer(file, geometry)
    try:
        packer.dump(geometry.derived)
    except (AttributeError, TypeError, RuntimeError, pickle.PicklingError):
        return None
    memory, size = np.zeros(sum(packer.sizes), np.uint8), packer.sizes[True]
    for (is_tensor, start, _, _), array in zip(packer.places, packer.arrays, strict=True):
        start += 0 if is_tensor else size
        memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return pickle.dumps((packer.places, file.getvalue()), 5), torch.from_numpy(memory), size


def unpack(geometry: Geometry, data: bytes, memory: Tensor, size: int) -> None:
    """Add the tables that `pack` returned to a geometry. A table that the geometry already has is
    not replaced.
    """
    places, objects = pickle.loads(data)
    derived = _Unpacker(io.BytesIO(objects), geometry, places, memory, size).load()
    geometry.derived.update(cast(Memo, derived))


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, geometry: Geometry) -> None:
        super().__init__(file, 5)
        self._geometry, self._numbers = geometry, dict[int, int]()
        # `sizes` has the bytes of numpy arrays, then the bytes of tensors.
        self.places, self.sizes = list[_Place](), [0, 0]
        # keeps objects alive, so that no later object gets the same id
        self._packed = list[object]()
        self.arrays: list[NDArray[np.generic]] = []

    def persistent_id(self, obj: object) -> int | None:
        if obj is self._geometry:
            return _GEOMETRY
        is_tensor = isinstance(obj, Tensor)
        if not is_tensor and type(obj) is not np.ndarray:
            return None
        if (number := self._numbers.get(id(obj))) is None:
            array = np.ascontiguousarray(obj.numpy() if is_tensor else obj)  # type: ignore[attr-defined]
            dtype = obj.dtype  # type: ignore[attr-defined]
            number = self._numbers[id(obj)] = len(self.places)
            self.places.append((is_tensor, self.sizes[is_tensor], dtype, array.shape))
            self.arrays.append(array)
            self._packed.append(obj)
            self.sizes[is_tensor] += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return number

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, weakref.ref):
            return weakref.ref, (obj(),)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, geometry: Geometry, places: list[_Place], memory: Tensor, size: int
    ) -> None:
        super().__init__(file)
        self._geometry, self._places = geometry, places
        self._tensor, self._array = memory[:size], memory[size:].numpy()
        self._made: list[object] = [None] * len(places)

    def persistent_load(self, number: int) -> object:
        if number == _GEOMETRY:
            return self._geometry
        if (made := self._made[number]) is None:
            is_tensor, start, dtype, shape = self._places[number]
            memory: Any = self._tensor if is_tensor else self._array
            part = memory[start : start + math.prod(shape) * dtype.itemsize]
            made = self._made[number] = part.view(dtype).reshape(shape)
        return made
