"""Check the arguments of kernels. A kernel with a wrong shape would read outside its tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = torch.float32, torch.bfloat16, torch.float16  # of operands
MAX_DIM = 256


class Shapes:
    """The sizes of dimensions by their letters, collected while tensors are checked in order.

    All tensors must be on the device of the first tensor, and a letter has one size in all tensors.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._device: torch.device | None = None

    def check(
        self, name: str, x: Any, dims: str, dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        """Raise a ValueError naming `x` unless it is a tensor of these dims and dtypes.

        `dims` is a text such as "B T H D".
        """
        letters = dims.split()
        expected = f"({', '.join(letters)})"
        if not isinstance(x, Tensor) or x.dim() != len(letters):
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor {expected}, got {found}")
        if dtypes is not None and x.dtype not in dtypes:
            raise ValueError(f"{name} must be of one of {list(dtypes)}, got {x.dtype}")
        self._device = self._device or x.device
        if x.device != self._device:
            raise ValueError(f"{name} must be on {self._device}, got {x.device}")
        for letter, size in zip(letters, x.shape, strict=True):
            if self._sizes.setdefault(letter, size) != size:
                wanted = f"{expected} with {letter} = {self._sizes[letter]}"
                raise ValueError(f"{name} must be {wanted}, got {tuple(x.shape)}")

    def check_shared(self, name: str, many: str, few: str) -> None:
        """Raise a ValueError unless `name` has a multiple of the shared number of heads.

        `many` and `few` are the letters of the two numbers of heads.
        """
        heads, shared = self._sizes[many], self._sizes[few]
        if not shared or heads % shared:
            raise ValueError(f"{name} must have a multiple of {shared} heads, got {heads}")


def check_rows(name: str, x: Tensor) -> None:
    """Raise a ValueError naming `x` (B, T, H, D) unless rows along D are contiguous."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} must have contiguous rows, got strides {x.stride()}")


def check_operand(name: str, x: Any) -> None:
    """Raise a ValueError naming `x` unless the kernels support its shape and dtype."""
    if isinstance(x, Tensor) and x.dim() == 4 and x.dtype in DTYPES and 0 < x.shape[3] <= MAX_DIM:
        return  # fast path: this is checked in each call
    Shapes().check(name, x, "B T H D", DTYPES)
    check_dim(f"{name}: the head dim", x.shape[-1])


def check_dim(name: str, dim: Any) -> None:
    """Raise a ValueError naming the argument unless it is a head dim that the kernels have."""
    check_int(name, dim, 1)
    if dim > MAX_DIM:
        raise ValueError(f"{name} must be at most {MAX_DIM}, got {dim}")


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise a ValueError naming the argument unless it is an instance of `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def check_list(name: str, values: Any, kind: type) -> None:
    """Raise a ValueError naming the argument unless it is a list or tuple of `kind` objects."""
    if not isinstance(values, list | tuple) or not all(isinstance(x, kind) for x in values):
        raise ValueError(f"{name} must be a list of {kind.__name__}, got {type(values).__name__}")


def check_number(name: str, value: Any) -> None:
    """Raise a ValueError naming the argument unless it is an int or a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {type(value).__name__}")


def check_int(name: str, value: Any, minimum: int) -> None:
    """Raise a ValueError naming the argument unless it is an integer of at least `minimum`."""
    try:
        fits = not isinstance(value, bool) and minimum <= operator.index(value) < 2**63
    except TypeError:
        fits = False
    if not fits:
        limits = f"from {minimum} to 2**63 - 1"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r:.200}")


def check_indices(name: str, array: Any, size: int | None = None) -> None:
    """Raise a ValueError naming the argument unless it is a NumPy array (size,) of integers."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} must be a NumPy array, got {type(array).__name__}")
    if array.ndim != 1 or array.dtype.kind != "i" or size not in (None, array.size):
        expected = "(n,)" if size is None else f"({size},)"
        found = f"{array.shape} of {array.dtype}"
        raise ValueError(f"{name} must be {expected} of integers, got {found}")


def check_kind(kind: Any, kinds: Sequence[str]) -> None:
    """Raise a ValueError unless `kind` is the name of a kernel."""
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"kind must be one of {list(kinds)}, got {kind!r}")
