"""Requests for attention servers, made from the cases with which strategies are tested."""

import dataclasses

import numpy as np
import torch

from seqpar import Layout
from seqpar.layout.masks.mask import Mask, slices_between
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient
from tests.support.cases import Case, by_documents, on_one_rank

DOCUMENTS = Layout.contiguous([0, 37, 38, 38, 100], 1)
CASES = {
    "causal": Case("ring", DOCUMENTS, causal=True),
    "full": Case("ring", DOCUMENTS, causal=False, heads=4, kv_heads=2),
    "window": Case("ring", DOCUMENTS, causal=True, window=(9, 0), heads=3, kv_heads=3, dim=5),
    "prefix": Case("ring", DOCUMENTS, causal=True, prefix=(9, 1, 0, 30), heads=6, kv_heads=2),
    "cross": Case(
        "ring", DOCUMENTS, causal=True, kv_layout=Layout.contiguous([0, 50, 51, 51, 99], 1)
    ),
    "softcap": Case("ring", DOCUMENTS, causal=True, softcap=2.0, value_dim=3, scale=0.3),
    "batch": Case("ring", DOCUMENTS, causal=True, batch=2, dlse=True),
    "bf16": Case("ring", DOCUMENTS, causal=True, heads=4, dtype=torch.bfloat16, dlse=True),
    "fp32": Case("ring", DOCUMENTS, causal=True, heads=4, kv_heads=2, dim=64, dtype=torch.float32),
}


def slices_of(case):
    """Return the slices of a case on one rank."""
    queries = case.layout.geometry
    keys = (case.kv_layout or case.layout).geometry
    prefix = None if case.prefix is None else np.array(case.prefix)
    return slices_between(queries, 0, keys, 0, Mask.of(case.causal, case.window, prefix, keys))


def forward(case, exact_out=False, backend="default"):
    """Make the request of a case's forward, with one task for all of it."""
    case = on_one_rank(by_documents(case))
    q, k, v, *_ = (x if x is None or case.batch else x[None] for x in case.inputs())
    scale = case.dim**-0.5 if case.scale is None else case.scale
    options = CallOptions(scale, case.softcap, backend, True)
    return Request(q, k, v, slices_of(case), options, exact_out)


def backward(case, out, lse):
    """Make the request of a case's backward from the results of its forward."""
    request = forward(case)
    *_, dout, dlse = case.inputs()
    dout, dlse = (x if x is None or case.batch else x[None] for x in (dout, dlse))
    output = OutputGradient.of(dout, dlse, out, lse, None)
    return dataclasses.replace(request, output=output)


def packed(case, tensors):
    """Return results in the form of `cases.oracle`."""
    return [x.double().numpy() if case.batch else x[0].double().numpy() for x in tensors]


def random_request(seed, rows=48, keys=64, heads=2, dim=8, dtype=torch.float32):
    """Make a causal request of one document; the queries are its last rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, rows, heads, dim), (1, keys, heads, dim), (1, keys, heads, dim)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    kv_layout, layout = Layout.contiguous(keys, 1), Layout.contiguous(rows, 1)
    mask = Mask.of(True, (-1, -1), None, kv_layout.geometry)
    slices = slices_between(layout.geometry, 0, kv_layout.geometry, 0, mask)
    return Request(q, k, v, slices, CallOptions(dim**-0.5, 0.0, "default", True))
