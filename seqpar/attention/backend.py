"""Choose the backend: the code with which a rank computes attention over the tokens it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from seqpar.core.arguments import shown
from seqpar.core.device_tables import device_of

BACKENDS = {
    "softmax": ["aten", "flash_attn", "reference", "triton"],
    "linear": ["aten", "reference", "triton"],
    "recurrent": ["aten", "fla", "reference"],
}
_FOLDERS = {
    "softmax": "seqpar.softmax.backends",
    "linear": "seqpar.linear.states.backends",
    "recurrent": "seqpar.linear.maps.backends",
}
MAX_HEAD_DIM = 256  # of our Triton kernels
DEFAULT = "default"  # `seqpar.softmax.backends.choice` or `seqpar.linear.strategy` chooses

_forced: str | None = None  # a plain global: torch.compile guards on it, but traces no ContextVar


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute the local part of every attention call within the context with the named backend.

    The backends are "aten" (ATen's fused kernels, with plain PyTorch where they are not exact),
    "triton" (our kernels, on CUDA), "flash_attn" (the best package of FlashAttention, on CUDA),
    "reference" (plain PyTorch), and "fla" (the package fla-core, on CUDA), which applies only to
    recurrent attention. Without a context, the backend is "aten". On CUDA it is "triton" for linear
    attention, "fla" for recurrent attention if it is installed, and for softmax attention the first
    of an order that depends on the GPU. A call's backward uses the backend of its forward, even
    outside the context. The choice holds for all threads of the process, so threads should not
    choose simultaneously.

    Raises a ValueError for an unknown name. A call that the backend cannot compute exactly raises
    one too.
    """
    global _forced
    known = sorted({*BACKENDS["softmax"], *BACKENDS["recurrent"]})
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"name: the backend must be one of {known}, got {shown(name)}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def current_backend(kind: str) -> str:
    """Return the backend, or DEFAULT, of a call of this kind made now."""
    forced = None if _forced == "fla" and kind != "recurrent" else _forced
    return forced or DEFAULT


@cache
def load_backend(kind: str, name: str) -> ModuleType:
    """Return a backend's module, imported at its first use; `kind` is a key of `BACKENDS`."""
    if name not in BACKENDS[kind]:
        raise ValueError(f"backend must be one of {BACKENDS[kind]}, got {name!r}")
    return import_module(f"{_FOLDERS[kind]}.{name}")


def refusal(kind: str, name: str, q: Tensor, v: Tensor) -> str | None:
    """Return why a backend cannot compute these operands, beginning with the argument, or None."""
    if name == DEFAULT:
        return None
    refuse = getattr(load_backend(kind, name), "refusal", None)
    return None if refuse is None else refuse(q, v)


def triton_refusal(q: Tensor, v: Tensor) -> str | None:
    """Return why our Triton kernels cannot compute these operands, or None."""
    import triton  # here, so that importing seqpar does not wait for it

    if q.dtype == torch.float64:
        return 'q must be bf16, fp16 or fp32 for the backend "triton", got torch.float64'
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > MAX_HEAD_DIM:
            limit = f"a head dim of at most {MAX_HEAD_DIM}"
            return f'{name} must have {limit} for the backend "triton", got {x.shape[-1]}'
    if device_of(q).type != "cuda" and not triton.knobs.runtime.interpret:
        return f'q must be on a CUDA device for the backend "triton", got {q.device}'
    return None


def rank_invariant_refusal(name: str, q: Tensor, v: Tensor) -> str | None:
    """Return the reason why a backend's bits may depend on a rank's number of heads, or None."""
    if q.device.type != "cuda":
        return None
    if name not in (DEFAULT, "triton"):
        found = 'got "ranks": its sums on CUDA depend on how many heads a rank has'
        return f"deterministic must be True or False with the backend {name!r}, {found}"
    return triton_refusal(q, v)
