"""Compile the kernels of FlashAttention-4 before a call sends its first message.

FlashAttention-4 compiles a variant of its kernels in the first call that needs the variant. This
takes 3 to 4 s. If a rank compiled in the middle of a call, all ranks that expect its messages would
wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from seqpar.core.device_tables import device_of
from seqpar.core.torch_private import fake_tensors

_compiled: set[Hashable] = set()  # the kinds of calls for which this process has compiled kernels


def compile_ahead(
    kind: Hashable, q: Tensor, call: Callable[[Callable[..., Tensor]], object]
) -> None:
    """Compile the kernels of FlashAttention-4 that a call will run, unless they are compiled
    already.

    Nothing is compiled in a process that does not use a GPU, such as a worker of a DataLoader.

    Args:
        kind: anything hashable that, together with the device and the dtype of q, identifies a
            variant of the kernels.
        q: a meta tensor, in place of the q of the call.
        call: a function that runs the kernels. Its argument is a function like `torch.empty`, which
            makes fake tensors on the GPU.
    """
    device = device_of(q)
    key = device, q.dtype, kind
    if not torch.cuda.is_initialized() or key in _compiled:
        return
    _compiled.add(key)
    try:
        with fake_tensors():
            call(partial(torch.empty, device=device))
    except Exception as error:  # an error of the compiler; the call itself may still succeed
        warnings.warn(
            f"FlashAttention-4 will compile in its first calls, and other ranks will wait: "
            f"compiling before failed with {type(error).__name__}: {error}",
            stacklevel=2,
        )
