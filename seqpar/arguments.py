"""Turn what users pass into numbers and arrays, or raise an error that names the argument."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
CuSeqlens = int | Sequence[int] | NDArray[Any] | Tensor


def as_int(name: str, value: Any, minimum: int) -> int:
    """Return `value` as an int of at least `minimum`, or raise a ValueError naming the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def as_bool(name: str, value: Any) -> bool:
    """Return `value`, a bool of Python or numpy, as a bool, or raise a ValueError that names it."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def as_float(name: str, value: Any) -> float:
    """Return `value`, a number, as a float, or raise a ValueError that names it."""
    if not isinstance(value, bool | str | bytes | bytearray):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise ValueError(f"{name} must be a number, got {value!r}")


def as_int_array(name: str, values: CuSeqlens) -> Ints:
    """Return `values` as a 1-D int64 array, or raise a ValueError naming the argument.

    A CUDA tensor costs one synchronisation.
    """
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        found = f"shape {array.shape} of {array.dtype}"
        raise ValueError(f"{name} must be a 1-D sequence of integers, got {found}")
    return array.astype(np.int64)


def as_int_tensor(name: str, values: CuSeqlens) -> Tensor:
    """Return `values` as a 1-D int64 tensor on the CPU, or raise a ValueError naming the argument.

    Where `values` is a tensor already, torch.compile can trace this.
    """
    if not isinstance(values, Tensor):
        return torch.from_numpy(as_int_array(name, values))
    if values.dim() != 1 or values.is_floating_point():
        found = f"shape {tuple(values.shape)} of {values.dtype}"
        raise ValueError(f"{name} must be a 1-D sequence of integers, got {found}")
    return values.to("cpu", torch.int64)


def parse_cu_seqlens(cu_seqlens: CuSeqlens) -> Ints:
    """Return `cu_seqlens` as an int64 array; an int is the length of a single document."""
    if isinstance(cu_seqlens, int | np.integer):
        return np.array([0, as_int("cu_seqlens", cu_seqlens, 0)])
    cu = as_int_array("cu_seqlens", cu_seqlens)
    if not cu.size or cu[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {cu[:1].tolist()}")
    lengths = np.diff(cu)
    if (lengths < 0).any():
        i = int(np.argmax(lengths < 0))
        found = f"{cu[i]} and then {cu[i + 1]} at index {i + 1}"
        raise ValueError(f"cu_seqlens must not decrease, got {found}")
    if lengths.size and lengths.max() >= 2**31:
        longest = lengths.max()
        raise ValueError(f"cu_seqlens: a document must be shorter than 2**31 tokens, got {longest}")
    return cu
