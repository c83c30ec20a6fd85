"""Activation checkpointing that recomputes everything in a block except its attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

import seqpar.linear.linear_operator
import seqpar.softmax.softmax_operator
import seqpar.softmax.tasks.split  # noqa: F401  defines the operators
from seqpar.core.arguments import check_function
from seqpar.core.compiling import is_traced
from seqpar.core.torch_private import dispatch_mode
from seqpar.memory.offload import Pack, Unpack, hooks_of_context

T = TypeVar("T")

SAVED_OPS = (
    torch.ops.seqpar.attention.default,
    torch.ops.seqpar.attention_begin.default,
    torch.ops.seqpar.attention_finish.default,
    torch.ops.seqpar.linear_attention.default,
)
"""The operators whose results a policy for selective checkpoints must save."""


def save_attention(
    ctx: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    """Return torch's policy for an operator: save results of attention, recompute everything else.

    This is a policy function for `torch.utils.checkpoint.create_selective_checkpoint_contexts`. To
    save the results of further operators, call it from your own policy function: `return
    CheckpointPolicy.MUST_SAVE if op in mine else save_attention(ctx, op, *args, **kwargs)`.
    """
    # `in` would also compare objects that are not operators.
    kept = any(op is saved for saved in SAVED_OPS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(function: Callable[..., T], *args: object, **kwargs: Any) -> T:
    """Return `function(*args, **kwargs)`. Backward recomputes everything in it except attention.

    Plain `torch.utils.checkpoint.checkpoint` also recomputes attention. On a long sequence,
    attention is the most expensive part of a block, and on several ranks its recomputation sends
    the bytes of forward again. Here, backward computes q, k and v again, and reuses the results of
    attention from forward. Attention sends and computes the same as without checkpointing, and
    gradients have the same bits. This is the rematerialisation-aware checkpointing of Li et al.,
    "DistFlashAttn: Distributed Memory-efficient Attention for Long-context LLMs Training" (2023).

    These tensors are kept for backward:

    * the arguments of `function`;
    * out and lse of each attention call. Together out and lse take T·Hq·(Dv·b + 4) bytes, where T
      is the rank's number of tokens times the batch size, and b is the number of bytes of an
      element. With fp64 tensors, lse takes 8 bytes instead of 4;
    * with Ulysses, unless it has `keep="tokens"`: q, k, v, out and lse of the rank's heads over all
      tokens, as without checkpointing.

    Within `seqpar.offload`, all of these tensors are kept in host memory.

    The implementation is torch's non-reentrant selective checkpoint with `save_attention`. All
    ranks must make the same calls. `function` must do the same when it runs again; random numbers
    are restored. A second backward over the same graph raises a RuntimeError, and so does a change
    of `out` in place. `torch.compile(fullgraph=True)` is supported.
    """
    check_function("function", function)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_contexts, **kwargs
    )


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    hooks = None if is_traced() else hooks_of_context()
    if hooks is None:
        return create_selective_checkpoint_contexts(save_attention)
    kept: dict[object, list[Any]] = defaultdict(list)
    return _Keeping(kept, hooks[0]), _Returning(kept, hooks[1])


class _Keeping(dispatch_mode()):  # type: ignore[misc]
    def __init__(self, kept: dict[object, list[Any]], pack: Pack) -> None:
        super().__init__()
        self._kept, self._pack = kept, pack

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(func is saved for saved in SAVED_OPS):
            self._kept[func].append(_map(self._keep, out))
        return out

    def _keep(self, x: Tensor) -> object:
        # The result is detached, because it refers to a graph that refers to this object.
        return self._pack(x.detach())


class _Returning(dispatch_mode()):  # type: ignore[misc]
    def __init__(self, kept: dict[object, list[Any]], unpack: Unpack) -> None:
        super().__init__()
        self._kept, self._unpack = kept, unpack

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if all(func is not saved for saved in SAVED_OPS):
            return func(*args, **(kwargs or {}))
        if not self._kept[func]:
            raise RuntimeError(
                "Trying to backward an extra time through a checkpoint, or through a checkpoint "
                "whose function calls attention more often when it runs again"
            )
        return _map(self._unpack, self._kept[func].pop(0))


def _map(function: Callable[[Any], object], results: Any) -> Any:
    if isinstance(results, Tensor):
        return function(results)
    return [function(x) for x in results]
