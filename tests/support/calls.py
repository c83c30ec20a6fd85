"""Functions that tests of several folders share: the inputs of a rank, and the bytes that a call
sends."""

import numpy as np
import torch

from seqpar import Layout
from tests.support.cases import module
from tests.support.ranks import virtual


def local(layout, rank, heads=2, kv_heads=1, dim=8, dtype=torch.float64, seed=0):
    """Return this rank's q, k and v, (T_local, heads, dim), which require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(layout.tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    return [
        layout.shard(torch.randn(s, generator=generator, dtype=dtype), rank).requires_grad_()
        for s in shapes
    ]


def sent_bytes(group, case, **options):
    """Make a call on this rank; return the bytes that it sends in forward and in backward."""
    attn = module(case.strategy, group, **options)
    comm = attn._bound.comm
    q, k, v = (case.layout.shard(x, comm.rank, 1).requires_grad_() for x in case.inputs()[:3])
    counts = [comm.sent_bytes]
    out = attn(q, k, v, case.layout, **case.options())
    counts.append(comm.sent_bytes)
    out.sum().backward()
    counts.append(comm.sent_bytes)
    return np.diff(counts).tolist()


def assert_infinite_sinks_are_limits(strategy, dtype, ranks=2):
    """Check that a sink of −∞ acts like no sink, and that a sink of +∞ leaves no weight to the
    keys.

    A sink of −∞ must also act like no sink for a row that sees no key.
    """
    layout, kv_layout = Layout.zigzag([0, 12, 30], ranks), Layout.zigzag([0, 5, 9], ranks)

    def call(comm, sinks, head):
        q, _, _ = local(layout, comm.rank, heads=3, dtype=dtype)
        _, k, v = local(kv_layout, comm.rank, kv_heads=3, dtype=dtype)
        sinks = None if sinks is None else torch.tensor(sinks, dtype=dtype, requires_grad=True)
        options = {"causal": True, "kv_layout": kv_layout, "sinks": sinks, "return_lse": True}
        out, lse = module(strategy, comm)(q, k, v, layout, **options)
        (out[:, head].square().sum() + out[:, head].sum()).backward()
        assert comm.rank or lse.isneginf().any()
        assert not out[lse.isneginf()].any()
        results = [out[:, head].detach(), *(x.grad[:, head] for x in (q, k, v))]
        return results, None if sinks is None else sinks.grad

    sinks = [-torch.inf, torch.inf, 0.5]
    for rank in range(ranks):
        none, _ = virtual(ranks, call, None, 0)[rank]
        without, without_grad = virtual(ranks, call, sinks, 0)[rank]
        nothing, nothing_grad = virtual(ranks, call, sinks, 1)[rank]
        bound = 16 * torch.finfo(dtype).eps
        for x, y in zip(none, without, strict=True):
            assert torch.allclose(x, y, rtol=bound, atol=bound)
        assert not any(x.any() for x in (*nothing, without_grad, nothing_grad))
