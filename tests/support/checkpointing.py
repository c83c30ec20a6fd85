"""A stack of transformer blocks to checkpoint, and how much it computes and sends.

The work of a pass is a list: the bytes and messages that it sends, and its calls of the backend.
"""

from functools import partial
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint as plain

import seqpar
from seqpar import Layout
from seqpar.softmax.backends import aten
from tests.support.cases import module

PLAIN = partial(plain, use_reentrant=False)


def call(function, *arguments):
    """Call the function without a checkpoint."""
    return function(*arguments)


class Block(torch.nn.Module):
    """A transformer block of 4 query and 2 KV heads."""

    def __init__(self, attention, width=32):
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(width), attention
        self.qkv, self.out = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 48),
            torch.nn.GELU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(48, width),
        )

    def forward(self, x, layout):
        q, k, v = (
            part.unflatten(-1, (-1, 8)) for part in self.qkv(self.norm(x)).split([32, 16, 16], -1)
        )
        x = x + self.out(self.attention(q, k, v, layout, causal=True).flatten(-2))
        return x + self.mlp(x)


def trained(group, strategy, wrap, compiled=False, blocks=2):
    """Train a stack of blocks, each called through `wrap`, for one step.

    Returns the gradients, the work of forward and the work of backward.
    """
    torch.manual_seed(0)
    model = torch.nn.ModuleList([Block(module(strategy, group)) for _ in range(blocks)]).double()
    comm = model[0].attention._bound.comm
    layout = Layout.zigzag([0, 9, 30], comm.size)
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


KINDS = {"ours": seqpar.checkpoint, "plain": PLAIN}


def compared(group, strategy, compiled=False, blocks=2, kinds=tuple(KINDS)):
    """Train a stack without checkpoints, and with each kind of checkpoint: ours and PyTorch's.

    Returns the work of forward and backward without checkpoints. Also returns, by kind of
    checkpoint, whether the gradients have the same bits as without checkpoints, and the work.
    """
    expected, *bare = trained(group, strategy, call, compiled, blocks)
    results = {}
    for name in kinds:
        gradients, *work = trained(group, strategy, KINDS[name], compiled, blocks)
        results[name] = all(map(torch.equal, gradients, expected)), work
    return bare, results


def assert_nothing_is_repeated(ranks):
    """Assert that our checkpoints repeat no work of attention in backward.

    PyTorch's checkpoints must repeat all of it.
    """
    for (forward, backward), results in ranks:
        assert forward[0] > 0 and forward[2] > 0 and backward[2] == 0
        assert results["ours"] == (True, [forward, backward])
        again = [x + y for x, y in zip(forward, backward, strict=True)]
        assert results.get("plain", (True, [forward, again])) == (True, [forward, again])
