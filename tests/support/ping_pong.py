"""A stack of transformer blocks that computes two nano-batches in alternation."""

import torch

import seqpar
from seqpar import Layout
from tests.support.cases import module
from tests.support.checkpointing import PLAIN, Block, call

KINDS = {"none": call, "ours": seqpar.checkpoint, "plain": PLAIN}


class PingPong(Block):
    """The block of the tests of checkpoints, with its call of attention in two parts."""

    def begin(self, x, layout):
        q, k, v = (
            part.unflatten(-1, (-1, 8)) for part in self.qkv(self.norm(x)).split([32, 16, 16], -1)
        )
        return self.attention.begin(q, k, v, layout, causal=True)

    def finish(self, x, begun):
        x = x + self.out(self.attention.finish(begun).flatten(-2))
        return x + self.mlp(x)

    def forward(self, ping, pong, layouts):
        begun = self.begin(ping, layouts[0]), self.begin(pong, layouts[1])
        return self.finish(ping, begun[0]), self.finish(pong, begun[1])


class Whole(PingPong):
    """The block of `PingPong`, with whole calls of attention."""

    def forward(self, ping, pong, layouts):
        return tuple(
            self.finish(x, self.begin(x, layout))
            for x, layout in zip((ping, pong), layouts, strict=True)
        )


def trained(group, kind, wrap=call, compiled=False, blocks=2):
    """Train some blocks for a step; return gradients, and the bytes sent in forward and in
    backward."""
    torch.manual_seed(0)
    attn = module("disaggregated+at keys", group)
    model = torch.nn.ModuleList([kind(attn) for _ in range(blocks)]).double().eval()
    comm = attn._bound.comm
    layouts = [Layout.zigzag([0, 9, 30], comm.size), Layout.contiguous([0, 20, 26], comm.size)]
    batches = [
        layout.shard(torch.randn(layout.tokens, 32, dtype=torch.float64), comm.rank)
        for layout in layouts
    ]
    batches = [x.requires_grad_() for x in batches]

    def stack(ping, pong, layouts):
        for block in model:
            ping, pong = wrap(block, ping, pong, layouts)
        return ping.square().sum() + pong.square().sum()

    if compiled:
        torch.compiler.reset()
        stack = torch.compile(stack, backend="aot_eager", fullgraph=True)
    before = comm.sent_bytes
    loss = stack(*batches, layouts)
    between = comm.sent_bytes
    loss.backward()
    gradients = [x.grad for x in (*batches, *model.parameters())]
    return gradients, between - before, comm.sent_bytes - between


def compared(group, compiled=False, blocks=2, kinds=tuple(KINDS)):
    """Return the bytes of whole calls, and results by kind of checkpoint, with a kind for none.

    A result says whether the gradients are within 1e-12 of those of whole calls, and how many bytes
    were sent. Autograd adds up the gradients of whole calls in a different order.
    """
    expected, *bare = trained(group, Whole, blocks=blocks)
    results = {}
    for name in kinds:
        gradients, *sent = trained(group, PingPong, KINDS[name], compiled, blocks)
        worst = max(float((x - y).abs().max()) for x, y in zip(gradients, expected, strict=True))
        results[name] = worst <= 1e-12, sent
    return bare, results


def assert_nothing_is_repeated(ranks):
    """Assert that our checkpoints repeat neither part of a call in backward.

    PyTorch's checkpoints must send the messages of forward again.
    """
    for bare, results in ranks:
        for name, found in results.items():
            assert found == (True, [bare[0], sum(bare)] if name == "plain" else bare)
