"""Turn what users pass into integers and arrays, or raise an error that names the argument."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
LONGEST_DOCUMENT = 2**31 - 1  # tokens: positions are int32
MOST_TOKENS = 2**40  # of a packed batch
MOST_RANKS = 2**16
CuSeqlens = int | Sequence[int] | NDArray[Any] | Tensor


def as_int(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return `value` as an int within bounds, or raise a ValueError naming the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def as_ranks(name: str, value: Any) -> int:
    """Return a number of ranks that a group can have, or raise a ValueError naming the argument."""
    return as_int(name, value, 1, MOST_RANKS)


def as_tensor(name: str, value: Any) -> Tensor:
    """Return `value` if it is a tensor, or raise a TypeError naming the argument."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    return value


def to_device(x: Tensor, device: Any) -> Tensor:
    """Return `x` on a device, or where it is for None; raise a ValueError naming `device`."""
    try:
        return x if device is None else x.to(torch.device(device))
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"device must be one that torch has here, got {device!r}") from error


def as_int_array(name: str, values: CuSeqlens) -> Ints:
    """Return `values` as a 1-D int64 array, a copy, or raise a ValueError naming the argument.

    A CUDA tensor costs one synchronisation.
    """
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (RuntimeError, TypeError, ValueError, OverflowError):  # bf16, on meta, ragged
        kind = str(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a 1-D sequence of integers, got a {kind}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        found = f"shape {array.shape} of {array.dtype}"
        raise ValueError(f"{name} must be a 1-D sequence of integers, got {found}")
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got {array.max()}")
    return array.astype(np.int64)


def as_int_tensor(name: str, values: CuSeqlens) -> Tensor:
    """Return `values` as a 1-D int64 tensor on the CPU, or raise a ValueError naming the argument.

    It is a copy, so that backward reads what forward read. Where `values` is a tensor already,
    torch.compile can trace this.
    """
    if not isinstance(values, Tensor):
        return torch.from_numpy(as_int_array(name, values))
    if values.dim() != 1 or values.dtype not in (*SIGNED, *UNSIGNED):
        found = f"shape {tuple(values.shape)} of {values.dtype}"
        raise ValueError(f"{name} must be a 1-D sequence of integers, got {found}")
    return values.to("cpu", torch.int64, copy=True)


def parse_cu_seqlens(cu_seqlens: CuSeqlens) -> Ints:
    """Return `cu_seqlens` as an int64 array; an int is the length of a single document."""
    if isinstance(cu_seqlens, int | np.integer):
        return np.array([0, as_int("cu_seqlens", cu_seqlens, 0, LONGEST_DOCUMENT)])
    cu = as_int_array("cu_seqlens", cu_seqlens)
    if not cu.size or cu[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {cu[:1].tolist()}")
    lengths = np.diff(cu)
    if (cu[1:] < cu[:-1]).any():
        i = int(np.argmax(cu[1:] < cu[:-1]))
        found = f"{cu[i]} and then {cu[i + 1]} at index {i + 1}"
        raise ValueError(f"cu_seqlens must not decrease, got {found}")
    if lengths.size and lengths.max() > LONGEST_DOCUMENT:
        longest = lengths.max()
        raise ValueError(f"cu_seqlens: a document must be shorter than 2**31 tokens, got {longest}")
    if cu[-1] > MOST_TOKENS:
        raise ValueError(f"cu_seqlens must end at {MOST_TOKENS} or before, got {cu[-1]}")
    return cu
