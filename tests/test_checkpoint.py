"""Checkpointing: the same bits, and with `seqpar.checkpoint` neither messages nor attention a second time."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as plain

import seqpar
from seqpar import Layout
from seqpar.backends import aten
from tests.cases import STRATEGIES, module
from tests.ranks import virtual

PLAIN = partial(plain, use_reentrant=False)


def call(function, *arguments):
    return function(*arguments)


class Block(torch.nn.Module):
    """A transformer block of 4 query and 2 KV heads."""

    def __init__(self, attention, width=32):
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(width), attention
        self.qkv, self.out = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 48), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(48, width)
        )

    def forward(self, x, layout):
        q, k, v = (part.unflatten(-1, (-1, 8)) for part in self.qkv(self.norm(x)).split([32, 16, 16], -1))
        x = x + self.out(self.attention(q, k, v, layout, causal=True).flatten(-2))
        return x + self.mlp(x)


def trained(group, strategy, wrap, compiled=False, blocks=2):
    """Gradients of a stack of blocks, each under `wrap`; and of forward and of backward: bytes, messages, backend calls."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([Block(module(strategy, group)) for _ in range(blocks)]).double()
    comm, layout = model[0].attention.engine.comm, Layout.zigzag([0, 9, 30], model[0].attention.engine.comm.size)
    x = layout.shard(torch.randn(30, 32, dtype=torch.float64), comm.rank).requires_grad_()

    def stack(x, layout):
        for block in model:
            x = wrap(block, x, layout)
        return x

    if compiled:
        torch.compiler.reset()  # the same function was compiled for other strategies
        stack = torch.compile(stack, backend="aot_eager", fullgraph=True)
    with mock.patch.object(aten, "forward", wraps=aten.forward) as forward:

        def counts():
            return torch.tensor([comm.sent_bytes, comm.sent_messages, forward.call_count])

        before = counts()
        loss = stack(x, layout).square().sum()
        between = counts()
        loss.backward()
        work = (between - before).tolist(), (counts() - between).tolist()
    return [x.grad, *(parameter.grad for parameter in model.parameters())], *work


def compared(group, strategy, compiled=False):
    expected, *bare = trained(group, strategy, call, compiled)
    results = {}
    for name, wrap in (("ours", seqpar.checkpoint), ("plain", PLAIN)):
        gradients, *work = trained(group, strategy, wrap, compiled)
        results[name] = all(map(torch.equal, gradients, expected)), work
    return bare, results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neither_attention_nor_its_messages_are_repeated(pool, strategy, compiled):
    for (forward, backward), results in pool(2, compared, strategy, compiled):
        assert forward[0] > 0 and forward[2] > 0 and backward[2] == 0
        assert results["ours"] == (True, [forward, backward])
        again = [x + y for x, y in zip(forward, backward, strict=True)]
        assert results["plain"] == (True, [forward, again])


def test_the_policy_serves_in_one_of_the_users_own():
    def kept(ctx, op, *args, **kwargs):
        seen.append(op)
        mine = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if mine else seqpar.save_attention(ctx, op, *args, **kwargs)

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
        return seqpar.checkpoint(lambda x: function(attn(x.sin(), x, x, layout, causal=True)), x).sum()

    (twice,) = virtual(1, backward_of, torch.exp)
    twice.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        twice.backward()
    (changed,) = virtual(1, backward_of, lambda out: out.mul_(2).exp())
    with pytest.raises(RuntimeError, match="has been mutated"):
        changed.backward()
