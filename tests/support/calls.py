"""Parts of calls in several folders' tests: a rank's inputs, and the bytes that a call sends."""

import numpy as np
import torch

from tests.support.cases import module


def local(layout, rank, heads=2, kv_heads=1, dim=8, dtype=torch.float64, seed=0):
    """Return this rank's q, k and v, (T_local, heads, dim), which require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(layout.tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    return [
        layout.shard(torch.randn(s, generator=generator, dtype=dtype), rank).requires_grad_()
        for s in shapes
    ]


def sent_bytes(group, case):
    """Make the call on this rank; return the bytes that it sends in forward and in backward."""
    attn = module(case.strategy, group)
    comm = attn._bound.comm
    q, k, v = (case.layout.shard(x, comm.rank, 1).requires_grad_() for x in case.inputs()[:3])
    counts = [comm.sent_bytes]
    out = attn(q, k, v, case.layout, **case.options())
    counts.append(comm.sent_bytes)
    out.sum().backward()
    counts.append(comm.sent_bytes)
    return np.diff(counts).tolist()
