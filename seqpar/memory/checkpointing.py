"""Activation checkpointing that recomputes everything in a block except its attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

import seqpar.linear.linear_operator
import seqpar.softmax.softmax_operator
import seqpar.softmax.tasks.split  # noqa: F401  defines the operators
from seqpar.core.arguments import check_function

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

    This is a policy function for `torch.utils.checkpoint.create_selective_checkpoint_contexts`. If
    you save more, call it from your policy function: `return CheckpointPolicy.MUST_SAVE if op in
    mine else save_attention(ctx, op, *args, **kwargs)`.
    """
    # `in` would also compare objects that are not operators.
    kept = any(op is saved for saved in SAVED_OPS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(function: Callable[..., T], *args: object, **kwargs: Any) -> T:
    """Return `function(*args, **kwargs)`; backward recomputes all but its attention.

    On a long sequence, attention is the most expensive part to recompute, and on several ranks it
    would send the bytes of forward again, as plain `torch.utils.checkpoint.checkpoint` does. Here,
    attention in backward sends and computes the same as without checkpointing, and gradients have
    the same bits: recomputation produces q, k and v again and takes the results of attention from
    forward. This is the rematerialisation-aware checkpointing of Li et al., "DistFlashAttn:
    Distributed Memory-efficient Attention for Long-context LLMs Training" (2023).

    Bytes kept per attention call in `function`, with b the bytes of an element and T the rank's
    tokens (times the batch): out and lse, T·Hq·(Dv·b + 4) (8 for fp64). Ulysses also keeps q, k, v,
    out and lse of the rank's heads over all tokens, as without checkpointing, unless it has
    `keep="tokens"`. The arguments of `function` are kept as well.

    This is torch's non-reentrant selective checkpoint with `save_attention`, and its rules hold:
    all ranks make the same calls; `function` must run again in the same way (its random numbers are
    restored); a second backward over the same graph, or an `out` changed in place, raises a
    RuntimeError. `torch.compile(fullgraph=True)` supports it.
    """
    check_function("function", function)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_contexts, **kwargs
    )


_contexts = partial(create_selective_checkpoint_contexts, save_attention)
