"""Activation checkpointing that recomputes all of a block but its attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

import seqpar.strategies  # noqa: F401  defines the operators


def save_attention(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for torch's selective checkpointing: keep what attention returns, recompute everything else.

    Call it from a policy of your own that keeps more:
    `return save_attention(ctx, op, *args, **kwargs) if op not in mine else CheckpointPolicy.MUST_SAVE`.
    """
    kept = op in (torch.ops.seqpar.attention.default, torch.ops.seqpar.linear_attention.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are recomputed in backward, except for seqpar's attention.

    Attention is what costs most to recompute, on a long sequence, and on several ranks it would send its forward's bytes
    again; plain `torch.utils.checkpoint.checkpoint` does that, with the same gradients. Here backward sends and computes
    what it does without checkpointing, and the gradients have the same bits: recomputation gives q, k and v again, and
    takes the attention's results from forward. This is the rematerialisation-aware checkpointing of Li et al.,
    "DistFlashAttn: Distributed Memory-efficient Attention for Long-context LLMs Training" (2023).

    Bytes kept for each attention call in `function`, with b an element's bytes, T the rank's tokens (times the batch):
    out and lse, T·Hq·(Dv·b + 4) (8 for fp64). Ulysses keeps its head-sharded q, k, v, out and lse besides, as it does without
    checkpointing: over all tokens, for the rank's share of the heads. Beside them, `function`'s arguments are kept.

    This is torch's non-reentrant, selective checkpoint with `save_attention`, and has its rules: all ranks run the same
    calls; `function` runs again as it did (its random numbers are restored); a second backward over the same graph, and an
    out changed in place, raise a RuntimeError. torch.compile(fullgraph=True) takes it.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


_contexts = partial(create_selective_checkpoint_contexts, save_attention)
