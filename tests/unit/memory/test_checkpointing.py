"""Checkpointing: the policy within a user's own, and what torch refuses."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import seqpar
from seqpar import Layout
from tests.support.checkpointing import PLAIN, call, trained
from tests.support.ranks import virtual


def test_the_policy_works_inside_a_users_own():
    def kept(ctx, op, *args, **kwargs):
        seen.append(op)
        mine = op == torch.ops.aten.addmm.default
        return (
            CheckpointPolicy.MUST_SAVE if mine else seqpar.save_attention(ctx, op, *args, **kwargs)
        )

    seen = []
    contexts = partial(create_selective_checkpoint_contexts, kept)
    gradients, _, backward = virtual(1, trained, "ring", partial(PLAIN, context_fn=contexts))[0]
    expected, *_ = virtual(1, trained, "ring", call)[0]
    assert all(map(torch.equal, gradients, expected)) and backward[2] == 0
    assert {torch.ops.aten.addmm.default, torch.ops.seqpar.attention.default} <= set(seen)


def test_what_torch_refuses_it_refuses():
    def backward_of(comm, function):
        layout, attn = Layout.zigzag(12, 1), seqpar.RingAttention(comm)
        x = torch.randn(12, 2, 8, requires_grad=True)
        return seqpar.checkpoint(
            lambda x: function(attn(x.sin(), x, x, layout, causal=True)), x
        ).sum()

    (twice,) = virtual(1, backward_of, torch.exp)
    twice.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        twice.backward()
    (changed,) = virtual(1, backward_of, lambda out: out.mul_(2).exp())
    with pytest.raises(RuntimeError, match="has been mutated"):
        changed.backward()
