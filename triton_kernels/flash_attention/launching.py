"""Launch kernels. Everything in a call except its tensors is prepared once and reused.

The key of a prepared call contains the signatures of its tensors. The tables of a call keep its
prepared calls, so a repeated call only needs one look-up.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..steps import step
from .configs import Config, padded, pieces

# Bytes of keys and values that concurrent programs may share: about a second-level cache.
CACHE_BYTES = 50 * 2**20


_NO_DESCRIPTORS = None, None  # of the two operands over whose blocks a kernel loops


@dataclass(frozen=True)
class Prepared:
    """A prepared launch, without its tensors.

    Attributes:
        kernel, grid: the kernel and its number of programs.
        device: the device of the launch.
        arguments: the positional arguments after the tensors.
        flags: the compile-time arguments, `num_warps` and `num_stages`.
        blocks: the rows and dims of a block of each tensor with a descriptor from the host.
        compiled: a list with the compiled kernel's launcher, or empty before the first launch. One
            launcher is enough, because tensors with different alignments have a different key and a
            different `Prepared`.
    """

    kernel: Any
    grid: tuple[int, ...]
    device: torch.device
    arguments: tuple[Any, ...]
    flags: dict[str, Any]
    blocks: tuple[list[int], ...] = ()
    compiled: list[Callable[..., None]] = field(default_factory=list)

    @cached_property
    def all_arguments(self) -> tuple[Any, ...]:
        """All arguments after the tensors, in the kernel's order, with compile-time arguments
        last."""
        constants = (self.flags[name] for name in self.kernel.arg_names if name in self.flags)
        return *self.arguments, *constants

    @cached_property
    def gpu_index(self) -> int | None:
        return self.device.index if self.device.type == "cuda" else None

    @cached_property
    def makes_descriptors(self) -> bool:
        """Whether the programs make tensor descriptors, for which they need memory."""
        return bool(self.flags.get("TMA"))

    def described(self, *operands: Tensor) -> tuple[TensorDescriptor | None, ...]:
        """Return the host's descriptors of two operands (B, T, H, D), or None for each."""
        if not self.blocks:
            return _NO_DESCRIPTORS
        return tuple(
            TensorDescriptor(x, [x.shape[0] * x.shape[1], x.stride(1)], [x.stride(1), 1], block)
            for x, block in zip(operands, self.blocks, strict=True)
        )


def run(launch: Prepared, *tensors: Any) -> None:
    """Launch a kernel with its tensors. Their device is current only during the launch."""
    step(partial(_run_on_device, launch), *tensors)


def _run_on_device(launch: Prepared, *tensors: Any) -> None:
    if launch.gpu_index is None or launch.gpu_index == torch.cuda.current_device():
        _run(launch, tensors)
    else:
        with torch.cuda.device(launch.gpu_index):
            _run(launch, tensors)


def _run(launch: Prepared, tensors: tuple[Any, ...]) -> None:
    if not launch.makes_descriptors:
        _launch(launch, tensors)
        return

    def launch_with_allocator() -> None:
        triton.set_allocator(_allocator(launch.device))
        _launch(launch, tensors)

    contextvars.copy_context().run(launch_with_allocator)  # the caller keeps its allocator


def _launch(launch: Prepared, tensors: tuple[Any, ...]) -> None:
    """Launch the compiled kernel, which Triton has to look up only once."""
    if launch.compiled:
        launch.compiled[0](*tensors, *launch.all_arguments)
        return
    kernel = launch.kernel[launch.grid](*tensors, *launch.arguments, **launch.flags)
    if kernel is not None:  # the interpreter compiles nothing
        launch.compiled.append(kernel[(*launch.grid, 1, 1)[:3]])


@cache
def _allocator(device: torch.device) -> Any:
    """Return torch's allocator, for the memory of programs' tensor descriptors."""
    return lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device)


def signature(*tensors: Any) -> Hashable:
    """Return everything in tensors on which a launch depends, except values and addresses.

    The signature of an argument that is no tensor is its type.
    """
    return tuple([
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
        if isinstance(x, Tensor)
        else type(x)
        for x in tensors
    ])  # fmt: skip


def alignments(*tensors: Tensor | None) -> Hashable:
    """Return each tensor's address modulo 16, on which Triton specialises, or None for None."""
    return tuple([None if x is None else x.data_ptr() % 16 for x in tensors])


class Known:
    """A part of the key of a call, whose hash is computed only once."""

    def __init__(self, *parts: Hashable) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self._parts == other._parts


def copied(config: Config, operands: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return, for each operand (B, T, H, D), whether the kernels need a contiguous copy of it.

    They need a copy if a tile spans 2**31 elements, or if the strides prevent a descriptor.
    """
    far = (max(x.stride(1), x.stride(3)) * 256 >= 2**31 for x in operands)
    full_lines = (x.shape[3] * x.element_size() % 16 == 0 for x in operands)
    return tuple(
        f or (config.tma and lines and not has_descriptor(x))
        for f, lines, x in zip(far, full_lines, operands, strict=True)
    )


def ready(operands: Sequence[Tensor], copies: Sequence[bool]) -> list[Tensor]:
    """Return the operands, some of them copied."""
    if not any(copies):
        return list(operands)
    return [x.contiguous() if c else x for x, c in zip(operands, copies, strict=True)]


def has_descriptor(x: Tensor) -> bool:
    """Return whether a tensor descriptor can describe x (B, T, H, D).

    The rows of x must be contiguous. Its address and its remaining strides must be positive
    multiples of 16 bytes.
    """
    strides = [s * x.element_size() for s in x.stride()[0 if x.shape[0] > 1 else 1 : 3]]
    return (
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in strides)
    )


def has_host_descriptor(x: Tensor) -> bool:
    """Return whether a descriptor of rows (B · T, H · D) can describe x (B, T, H, D).

    The dims of x must fill a block, and its heads must lie one after another within each row,
    without overlap.
    """
    batch, rows, heads, dim = x.shape
    of_batch, of_row, of_head, _ = x.stride()
    inside = of_head >= dim and (heads - 1) * of_head + dim <= of_row
    return dim == padded(dim) and inside and (batch == 1 or of_batch == rows * of_row)


def strides(x: Tensor, dims: int) -> tuple[int, ...]:
    """Return the strides of the first `dims` dims of x (B, …).

    If B is 1, the batch stride is arbitrary. It is then returned as 0, so that one compilation is
    enough.
    """
    found = x.stride()[:dims]
    return (0, *found[1:]) if x.shape[0] == 1 else found


def head_block(x: Tensor, y: Tensor, group: int, heads: int) -> int:
    """Return the number of heads that programs compute at the same time. Heads are counted over the
    batch.

    The second-level cache can hold the keys and values of this number of heads. A `group` of heads
    shares a head of x (B, T, H, D) and y (B, T, H, Dv).
    """
    per_group = max(1, x.shape[1] * (x.shape[3] + y.shape[3]) * x.element_size())
    return min(heads, max(1, CACHE_BYTES // per_group) * group)


def constants(
    config: Config, dim: int, value_dim: int, dtype: torch.dtype, described: str
) -> dict[str, Any]:
    """Return the kernels' compile-time arguments, which follow from configuration and operands."""
    return {
        **dims_of("D", dim), **dims_of("DV", value_dim),
        "TILE_ROWS": config.tile_rows, "BLOCK_COLUMNS": config.block_columns, "TMA": described,
        "PRECISION": precision(dtype),
    }  # fmt: skip


def dims_of(name: str, dim: int) -> dict[str, int]:
    """Return a head dim and the dims of its pieces, by the names that the kernels give them."""
    block, rest = pieces(dim)
    return {name: dim, f"BLOCK_{name}": block, f"REST_{name}": rest}


def precision(dtype: torch.dtype | None) -> str:
    """Return the precision of products of operands of a dtype; for fp32, torch's switch decides."""
    if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def scoring(scale: float, softcap: float) -> tuple[float, float]:
    """Return the kernels' `scale` and `cap`, in units of log2.

    Scores are scale · q·k, or with a softcap cap · tanh(scale · q·k).
    """
    log2_e = 1 / math.log(2)
    return (abs(scale) / softcap, softcap * log2_e) if softcap else (abs(scale) * log2_e, 0.0)
