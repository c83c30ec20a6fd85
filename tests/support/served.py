"""Calls of attention on a pool of servers, to compare with the oracle and with each other."""

import dataclasses

import torch

from seqpar import DisaggregatedAttention
from tests.support.cases import on_one_rank
from tests.support.requests import CASES as REQUESTS
from tests.support.requests import by_documents

# The cases of single requests, and cases that a single request cannot express.
CASES = REQUESTS | {
    "sinks": dataclasses.replace(REQUESTS["causal"], sinks=True, dlse=True, heads=4, kv_heads=2),
    "sinks, bf16": dataclasses.replace(REQUESTS["bf16"], sinks=True, batch=2),
    "cross, window": dataclasses.replace(REQUESTS["cross"], window=(7, 3), causal=False),
    "ranges": dataclasses.replace(
        REQUESTS["full"],
        ranges=((0, 0, 37, 0, 37, None, 0), (0, 5, 30, 5, 30, 1, None), (3, 9, 62, 0, 20, -30, 3)),
    ),
    "negative scale": dataclasses.replace(REQUESTS["full"], scale=-0.5, prefix=(1, 0, 0, 9)),
}
CUT = {"tasks": 5, "tile": 4}  # options that cut even short documents into several tasks


def begin(pool, case, **options):
    """Make a case's call; return the arguments of `backward`."""
    case = on_one_rank(by_documents(case))
    attn = DisaggregatedAttention(pool, **CUT | options)
    q, k, v, sinks, dout, dlse = case.inputs()
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = attn(q, k, v, case.layout, sinks=sinks, return_lse=True, **case.options())
    return (out, lse), (dout, dlse), leaves


def backward(outputs, gradients, leaves):
    """Run backward; return out, lse, dq, dk, dv and dsinks, in fp64."""
    pairs = [(x, dx) for x, dx in zip(outputs, gradients, strict=True) if dx is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    found = [*(x.detach() for x in outputs), *(leaf.grad for leaf in leaves)]
    return [x.double().numpy() for x in found]


def call(pool, case, **options):
    return backward(*begin(pool, case, **options))
