"""Convert arguments of users to numbers and arrays. If an argument is wrong, raise an error that
names it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
RowIndex = Ints | NDArray[np.bool_]  # indices of rows, or a mask that chooses rows
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
MAX_DOCUMENT_TOKENS = 2**31 - 1  # positions are int32
MAX_TOKENS = 2**40  # per packed batch
MAX_RANKS = 2**16
CuSeqlens = int | Sequence[int] | NDArray[np.generic] | Tensor
WindowSize = Sequence[int | None] | None
Deterministic = bool | Literal["ranks"]

MAX_LISTED = 8  # an error lists at most this number of values
_MAX_SHOWN_CHARACTERS = 200  # an error shows at most this number of characters of a wrong value
# Errors that the conversion of a wrong value may raise, for example of a meta tensor or of an
# integer of 5,000 digits.
_UNFIT = TypeError, ValueError, OverflowError, RuntimeError, AttributeError, MemoryError


def shown(value: object) -> str:
    """Return the repr of a value as a text for errors. A long text is cut."""
    try:
        text = repr(value)
    except _UNFIT:
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"


def listed(values: Sequence[object]) -> str:
    """Return the first values of a sequence as a text for errors."""
    texts = [str(x) for x in values[:MAX_LISTED]]
    return ", ".join([*texts, "…"] if len(values) > MAX_LISTED else texts)


def as_int(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return `value` as an int from `minimum` to `maximum`, or raise a ValueError that names the
    argument `name`.

    numpy's integers, and tensors with one integer, are accepted. A bool is not.
    """
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value}")
    try:
        # operator.index is not used for an int, because torch.compile would specialise on the
        # value.
        number: int = value if isinstance(value, int) else operator.index(value)
    except _UNFIT:
        way_out = ""
        if hasattr(value, "size") and (hasattr(value, "rank") or hasattr(value, "get_rank")):
            way_out = ": the size of a group is torch.distributed.get_world_size(group)"
        raise ValueError(f"{name} must be an integer, got {shown(value)}{way_out}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {shown(number)}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {shown(number)}")
    return number


def as_dim(name: str, value: object) -> int:
    """Return the dimension `value` of a tensor as an int, or raise a ValueError that names the
    argument `name`.
    """
    return as_int(name, value, -64, 63)


def as_ranks(name: str, value: object) -> int:
    """Return `value` as a number of ranks, or raise a ValueError that names the argument `name`."""
    return as_int(name, value, 1, MAX_RANKS)


def as_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def as_deterministic(value: object) -> Deterministic:
    if isinstance(value, str) and value == "ranks":
        return "ranks"
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f'deterministic must be True, False or "ranks", got {shown(value)}')
    return bool(value)


def as_float(name: str, value: Any) -> float:
    if not isinstance(value, bool | str | bytes | bytearray):
        try:
            return float(value)
        except _UNFIT:
            pass
    raise ValueError(f"{name} must be a number, got {shown(value)}")


def as_choice(name: str, value: object, known: Sequence[str]) -> str:
    """Return `value` if it is one of the strings in `known`, or raise a ValueError that names the
    argument `name`.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {shown(value)}")
    return value


def as_device(value: Any) -> torch.device:
    """Return the device that `value` describes, or raise a ValueError that names the argument."""
    try:
        return torch.device(value)
    except _UNFIT:
        expected = "a device of torch, such as 'cuda:0'"
        raise ValueError(f"device must be {expected}, got {shown(value)}") from None


def as_sequence(name: str, values: object, kind: str) -> list[Any]:
    """Return the entries of a list, a tuple or an array. `kind` is the word for the entries in
    errors.
    """
    if not isinstance(values, str | bytes | dict):
        try:
            return list(values)  # type: ignore[call-overload]
        except _UNFIT:
            pass
    raise ValueError(f"{name} must be a sequence of {kind}, got {shown(values)}")


def as_path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be a path, got {shown(value)}")
    return Path(value)


def check_type(name: str, value: object, kind: type) -> None:
    """Raise a TypeError that names the argument unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {shown(value)}")


def check_function(name: str, value: object) -> None:
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {shown(value)}")


def check_tensor(
    name: str, value: object, device: torch.device | None = None, or_cpu: bool = False
) -> None:
    """Raise a ValueError that names the argument unless `value` is a dense tensor.

    If `device` is given, the tensor must be on this device. With `or_cpu`, it may also be on the
    CPU.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got one of layout {value.layout}")
    # torch gives nested and quantized tensors the same `layout` as dense tensors.
    if value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized"
        raise ValueError(f"{name} must be a dense tensor, got a {kind} one")
    if device not in (None, value.device) and not (or_cpu and value.is_cpu):
        expected = f"{device}{', or the CPU' * or_cpu}"
        raise ValueError(f"{name} must be on q's device, {expected}, got {value.device}")


def to_device(x: Tensor, device: torch.device | str | None) -> Tensor:
    """Return `x` on a device, or `x` itself if the device is None. Raise a ValueError if `device`
    is wrong.
    """
    try:
        return x if device is None else x.to(torch.device(device))
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        found = shown(device)
        raise ValueError(f"device must be one that torch has here, got {found}") from error


def as_int_array(name: str, values: CuSeqlens) -> Ints:
    """Return `values` as a 1-D int64 array, or raise a ValueError that names the argument.

    A tensor on a GPU costs one synchronisation.
    """
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except _UNFIT:
        found = shown(values)
        raise ValueError(f"{name} must be a 1-D sequence of integers, got {found}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        found = f"shape {array.shape} of {array.dtype}"
        raise ValueError(f"{name} must be a 1-D sequence of integers, got {found}")
    if array.dtype == np.uint64 and (array >= 2**63).any():
        raise ValueError(f"{name} must hold integers below 2**63, got {array.max()}")
    return array.astype(np.int64)


def as_lengths(name: str, values: CuSeqlens) -> Ints:
    """Return lengths (documents,) as int64, or raise a ValueError that names a wrong length."""
    lengths = as_int_array(name, values)
    longest = lengths.max(initial=0)
    if longest > MAX_DOCUMENT_TOKENS:
        raise ValueError(f"{name} must each be below 2**31 tokens, got {longest}")
    if (lengths < 0).any():
        i = int(np.argmax(lengths < 0))
        raise ValueError(f"{name} must not be negative, got {lengths[i]} at index {i}")
    return lengths


def as_int_tensor(name: str, values: CuSeqlens) -> Tensor:
    """Return `values` as a 1-D int64 tensor on the CPU, or raise a ValueError that names the
    argument.

    The result is a copy. torch.compile can trace this function if `values` is a tensor.
    """
    if not isinstance(values, Tensor):
        return torch.from_numpy(as_int_array(name, values))
    check_tensor(name, values)
    if values.dim() != 1 or values.dtype not in (*SIGNED, *UNSIGNED) or values.is_meta:
        found = f"shape {tuple(values.shape)} of {values.dtype} on {values.device}"
        raise ValueError(f"{name} must be a 1-D sequence of integers, got {found}")
    return values.to("cpu", torch.int64, copy=True)


def parse_cu_seqlens(cu_seqlens: CuSeqlens, name: str = "cu_seqlens") -> Ints:
    """Return `cu_seqlens` as int64. An int stands for one document of this length. In errors, the
    argument is called `name`.
    """
    if isinstance(cu_seqlens, int | np.integer) and not isinstance(cu_seqlens, bool):
        cu_seqlens = [0, as_int(name, cu_seqlens, 0, MAX_DOCUMENT_TOKENS)]
    cu = as_int_array(name, cu_seqlens)
    if not cu.size or cu[0] != 0:
        raise ValueError(f"{name} must start at 0, got {cu[:1].tolist()}")
    before, after = cu[:-1], cu[1:]
    decreases = after < before
    if decreases.any():
        i = int(np.argmax(decreases))
        found = f"{cu[i]} and then {cu[i + 1]} at index {i + 1}"
        raise ValueError(f"{name} must not decrease, got {found}")
    longest = (after - before).max(initial=0)
    if longest > MAX_DOCUMENT_TOKENS:
        raise ValueError(f"{name} must have documents of fewer than 2**31 tokens, got {longest}")
    if cu[-1] > MAX_TOKENS:
        raise ValueError(f"{name} must end at {MAX_TOKENS} or before, got {cu[-1]}")
    return cu


def parse_window(window_size: WindowSize) -> tuple[int, int]:
    """Return a window as (left, right), where −1 means no limit. None and bounds that are longer
    than any document become −1.
    """
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        expected = "two integers, (left, right), or None"
        way_out = "a sliding window of w keys, with the query's own, is (w - 1, 0)"
        raise ValueError(f"window_size must be {expected}, got {shown(window_size)}: {way_out}")
    left, right = (
        -1 if bound is None else as_int("window_size: a bound (-1 is unlimited)", bound, -1)
        for bound in window_size
    )
    return (-1 if left > MAX_DOCUMENT_TOKENS else left), (
        -1 if right > MAX_DOCUMENT_TOKENS else right
    )
