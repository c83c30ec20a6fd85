"""The interface of a softmax backend, and the choice of the backend for a block of keys.

Users may force a backend. Otherwise CPUs use `aten`, and CUDA devices the first kernel of
`kernel_order.py` that computes a block completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from seqpar.attention.backend import DEFAULT
from seqpar.core.arguments import shown
from seqpar.core.device_tables import is_on_cuda
from seqpar.layout.masks.mask import Blocks, Slices
from seqpar.softmax.backends import aten, aten_cuda
from seqpar.softmax.backends.kernel_order import best_backend
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

# (q, blocks, slices of the blocks, options, sinks, tensors to write to or None) -> out, lse
ForwardBlocks = Callable[
    [
        Tensor,
        Iterable[Sequence[Tensor]],
        Blocks,
        CallOptions,
        Tensor | None,
        tuple[Tensor, Tensor] | None,
    ],
    tuple[Tensor, Tensor],
]


class Backend(Protocol):
    """A module that computes attention over the keys that a rank has."""

    @property
    def forward_blocks(self) -> ForwardBlocks | None:
        """A function that computes all blocks of keys in turn, if the backend has one."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        partial: Partial,
        options: CallOptions,
    ) -> None:
        """Merge into `partial` the attention of q (B, T, Hq, D) over k and v."""

    def backward(
        self,
        output: OutputGradient,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        gradients: PartialGradients,
        options: CallOptions,
    ) -> None:
        """Add to `gradients` what flows through the slices."""


def _aten() -> Backend:
    return aten


def _flash_attn() -> Backend:
    from seqpar.softmax.backends import flash_attn

    return flash_attn


def _reference() -> Backend:
    from seqpar.softmax.backends import reference

    return reference


def _triton() -> Backend:
    from seqpar.softmax.backends import triton

    return triton


LOADERS: dict[str, Callable[[], Backend]] = {
    "aten": _aten,
    "flash_attn": _flash_attn,
    "reference": _reference,
    "triton": _triton,
}


@cache
def load_backend(name: str) -> Backend:
    """Return a backend; its module is imported at its first use."""
    if name not in LOADERS:
        raise ValueError(f"backend must be one of {list(LOADERS)}, got {shown(name)}")
    return LOADERS[name]()


def choose_backend(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions
) -> Backend:
    name = options.backend
    return load_backend(default_backend(q, k, v, slices, options) if name == DEFAULT else name)


def default_backend(q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> str:
    """Return the name of the backend for a block of keys, if users force none.

    It depends only on the type of the device, the dtype, the head dims, the options and the slices.
    Backward therefore uses the same backend for a block as forward.
    """
    if options.rank_invariant:  # `rank_invariant_refusal` has checked the call
        return "triton" if is_on_cuda(q) else "aten"
    if not aten_cuda.computes(q):
        return "aten"
    if slices.most_runs:  # no other kernel's launches are the same for all documents
        return "triton"
    return best_backend(q, v, slices, options)
