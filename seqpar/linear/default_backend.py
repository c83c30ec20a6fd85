"""Choose the backend of linear and recurrent attention, if users force none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

# On CUDA. "linear" attention has constant decays or none: all its kinds are our kernels'.
PREFERRED = {"linear": "triton", "recurrent": "fla"}


def default_backend(family: str, on_cuda: bool, refusal: Callable[[str], str | None]) -> str:
    """Return the name of a call's backend; `refusal` returns why a backend cannot compute it.

    CPUs use "aten". On CUDA it is many small operators, so its choice there warns once.
    """
    if not on_cuda:
        return "aten"
    preferred = PREFERRED[family]
    reason = refusal(preferred)
    if reason is None:
        return preferred
    _warn(f"{family} attention runs as plain PyTorch on CUDA: {reason}")
    return "aten"


@cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
