"""Activation checkpointing that recomputes all of a block but its attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

import seqpar.linear.operator
import seqpar.recurrent.operator
import seqpar.softmax.operator
import seqpar.softmax.tasks.split_operator  # noqa: F401  define the operators
from seqpar.core.arguments import check_function

SAVED_OPS = (
    torch.ops.seqpar.attention.default,
    torch.ops.seqpar.attention_begin.default,
    torch.ops.seqpar.attention_finish.default,
    torch.ops.seqpar.linear_attention.default,
    torch.ops.seqpar.recurrent_attention.default,
)
"""The operators whose results a policy for selective checkpoints must save."""


def save_attention(
    ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Return torch's policy for an operator: keep what attention returns, recompute all else.

    It is a policy function for `torch.utils.checkpoint.create_selective_checkpoint_contexts`. Call
    it from your policy function if you keep more: `return CheckpointPolicy.MUST_SAVE if op in mine
    else save_attention(ctx, op, *args, **kwargs)`.
    """
    kept = any(op is saved for saved in SAVED_OPS)  # `in` would compare what are no operators
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; backward recomputes its activations but not attention.

    On a long sequence attention costs most to recompute, and on several ranks it would send its
    forward's bytes again; plain `torch.utils.checkpoint.checkpoint` does that, with the same
    gradients. Here backward's attention sends and computes what it does without checkpointing, and
    the gradients have the same bits: recomputation gives q, k and v again, and takes the
    attention's results from forward. This is the rematerialisation-aware checkpointing of Li et
    al., "DistFlashAttn: Distributed Memory-efficient Attention for Long-context LLMs Training"
    (2023).

    Bytes kept for each attention call in `function`, with b the bytes of an element and T the
    rank's tokens (times the batch): out and lse, T·Hq·(Dv·b + 4) (8 for fp64). Ulysses also keeps
    q, k, v, out and lse of the rank's heads over all tokens, as it does without checkpointing,
    unless it has `keep="tokens"`.
    `function`'s arguments are kept as well.

    This is torch's non-reentrant, selective checkpoint with `save_attention`. Its rules hold:
    all ranks run the same calls; `function` runs again as it did (its random numbers are restored);
    a second backward over the same graph, and an out changed in place, raise a RuntimeError.
    torch.compile(fullgraph=True) takes it.
    """
    check_function("function", function)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_contexts, **kwargs
    )


_contexts = partial(create_selective_checkpoint_contexts, save_attention)
