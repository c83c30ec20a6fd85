"""Choose the backend: the code with which a rank computes attention over its own tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from seqpar.core.arguments import shown
from seqpar.core.device_tables import device_of
from seqpar.core.torch_private import inherited, set_inherited

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
DEFAULT = "default"  # softmax/attend.py or linear/linear_strategy.py chooses the backend


class _Forced(threading.local):
    name: str | None = None


_forced = _Forced()
_KEY = "seqpar backend"  # for uncompiled calls, the value that autograd's threads inherit


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend with which a rank computes attention calls within the context.

    The backends are:

    * "aten": ATen's fused kernels, and plain PyTorch for calls that these kernels do not compute
      exactly;
    * "triton": our kernels, on CUDA;
    * "flash_attn": the best installed package of FlashAttention, on CUDA;
    * "reference": plain PyTorch;
    * "fla": the package fla-core, on CUDA, for recurrent attention only.

    Without a context, the backend on a CPU is "aten". On CUDA it is "triton" for linear attention,
    and "fla" for recurrent attention if fla-core is installed. For softmax attention on CUDA, it is
    the first backend that can compute the call, in an order that depends on the GPU. The backward
    of a call uses the backend of its forward, even outside the context. The choice applies to calls
    of this thread, and to checkpoints that are recomputed in backwards that this thread runs.

    All ranks of a group must use the same backend for a call, because the dtype in which ranks send
    results to each other depends on the backend. With `make_attention(..., check_ranks=True)`, all
    ranks raise a ValueError if backends differ.

    Raises a ValueError for an unknown name. A call that the backend cannot compute exactly also
    raises a ValueError.
    """
    known = sorted({*BACKENDS["softmax"], *BACKENDS["recurrent"]})
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"name: the backend must be one of {known}, got {shown(name)}")
    with forced_backend(name):
        yield


@contextmanager
def forced_backend(name: str | None) -> Iterator[None]:
    """Use the backend `name` for calls of this thread within the context. None means the default
    backend.
    """
    before, inherited_before = _forced.name, _inherited()
    _force(name, name)
    try:
        yield
    finally:
        _force(before, inherited_before)


def _force(name: str | None, name_to_inherit: str | None) -> None:
    _forced.name = name
    if not torch.compiler.is_dynamo_compiling():
        set_inherited(_KEY, name_to_inherit)


def _inherited() -> str | None:
    """Return the backend of this thread, or None for the default backend.

    A thread in which autograd runs a backward has the backend of the thread that called backward.
    """
    return _forced.name if torch.compiler.is_dynamo_compiling() else inherited(_KEY, None)


def current_backend(kind: str) -> str:
    """Return the backend that a call of this kind would use now, or DEFAULT."""
    name = _inherited()
    return DEFAULT if name is None or (name == "fla" and kind != "recurrent") else name


@cache
def load_backend(kind: str, name: str) -> ModuleType:
    """Return the module of a backend, which is imported when it is first used.

    `kind` is a key of `BACKENDS`.
    """
    if name not in BACKENDS[kind]:
        raise ValueError(f"backend must be one of {BACKENDS[kind]}, got {name!r}")
    return import_module(f"{_FOLDERS[kind]}.{name}")


def refusal(kind: str, name: str, q: Tensor, v: Tensor) -> str | None:
    """Return the reason why a backend cannot compute these operands, or None if it can."""
    if name == DEFAULT:
        return None
    refuse = getattr(load_backend(kind, name), "refusal", None)
    return None if refuse is None else refuse(q, v)


def triton_refusal(q: Tensor, v: Tensor) -> str | None:
    """Return the reason why our Triton kernels cannot compute these operands, or None if they
    can.
    """
    import triton  # imported here, so that importing seqpar does not wait for triton

    if q.dtype == torch.float64:
        return 'q must be bf16, fp16 or fp32 for the backend "triton", got torch.float64'
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > MAX_HEAD_DIM:
            limit = f"a head dim of at most {MAX_HEAD_DIM}"
            return f'{name} must have {limit} for the backend "triton", got {x.shape[-1]}'
    device, interpreted = device_of(q).type, triton.knobs.runtime.interpret
    if device != "cuda" and not interpreted:
        return f'q must be on a CUDA device for the backend "triton", got {q.device}'
    if interpreted and device != "meta" and q.dtype == torch.bfloat16:
        # The interpreter stores bf16 as integers with the same bits, and would multiply these
        # integers.
        place = 'for the backend "triton" in Triton\'s interpreter (TRITON_INTERPRET=1)'
        remedy = "cast q, k and v, or use another backend"
        return f"q must be fp16 or fp32 {place}, got torch.bfloat16: {remedy}"
    return None


def rank_invariant_refusal(name: str, q: Tensor, v: Tensor) -> str | None:
    """Return the reason why `deterministic="ranks"` is impossible with a backend, or None.

    It is impossible if the bits of results depend on the number of heads on a rank.
    """
    if q.device.type != "cuda":
        return None
    if name not in (DEFAULT, "triton"):
        reason = "the bits of this backend on CUDA depend on how many heads a rank has"
        found = f'got "ranks": {reason}; use the backend "triton"'
        return f"deterministic must be True or False with the backend {name!r}, {found}"
    return triton_refusal(q, v)
