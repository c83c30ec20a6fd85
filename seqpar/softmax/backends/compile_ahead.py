"""Compile what calls of a kernel will run, before the first of these calls begins.

FlashAttention-4 compiles a variant in the first call that needs it, for 3 to 4 s. If one rank
compiled in the middle of a call, the other ranks would wait for its messages. Rehearsals compile
instead: all ranks rehearse a call before they send its first message, and `Layout.prepare`
rehearses calls before the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from seqpar.core.device_tables import device_of
from seqpar.core.torch_private import fake_tensors

_compiled: set[Hashable] = set()  # the kinds of calls for which this process has compiled


def compile_ahead(
    kind: Hashable, q: Tensor, call: Callable[[Callable[..., Tensor]], object]
) -> None:
    """Run a call on tensors without data, once for each kind of call.

    In a process that does not use a GPU, such as a worker of a DataLoader, nothing is compiled.
    q is a meta tensor of a rehearsal. `call(empty)` gets a function that makes tensors on the
    device for which q stands, and takes the arguments of `torch.empty`.
    """
    device = device_of(q)
    key = device, q.dtype, kind
    if not torch.cuda.is_initialized() or key in _compiled:
        return
    _compiled.add(key)
    try:
        with fake_tensors():
            call(partial(torch.empty, device=device))
    except Exception as error:  # the compiler's; the call itself may still succeed
        warnings.warn(
            f"FlashAttention-4 will compile in its first calls, and other ranks will wait: "
            f"compiling before failed with {type(error).__name__}: {error}",
            stacklevel=2,
        )
