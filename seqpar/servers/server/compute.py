"""The computation of attention for requests.

A *fused* call computes several requests of one kind together. The result of each request has the
same bits as in a separate call. A fused call concatenates the queries of all requests into one
tensor, the keys into a second tensor, and the values into a third tensor. The slices of all
requests become one table, and no slice has rows of two requests. Each request begins at a multiple
of 32 rows, so that its rows have the same alignment in memory as in a separate call. The alignment
must be the same because the bits of a matrix product can depend on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT
from seqpar.core.dtypes import accumulator_dtype
from seqpar.layout.masks.mask import Blocks, Slices
from seqpar.servers.wire.host_memory import host_memory
from seqpar.servers.wire.request import Request
from seqpar.softmax.attend import attend_backward, attend_blocks, default_backend
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, PartialGradients

_ALIGNMENT = 64  # the alignment of a tensor's memory in bytes
_ROWS = 32  # 32 rows are a multiple of 64 bytes for any dtype, number of heads and head dim


def kind_of(request: Request, device: torch.device) -> Hashable:
    """Return a key. Requests with equal keys can be computed in one call on this device.

    On a GPU, each forward pass of Triton or ATen gets a unique key, because the bits of its result
    would depend on the other requests in the same call.
    """
    name = _backend_of(request, device)
    # Triton splits long rows of keys depending on the number of rows in the launch. ATen uses cuDNN
    # if all documents are equally long.
    alone = name in ("triton", "aten") and device.type == "cuda" and request.output is None
    return (
        request.operation,
        request.q.dtype,
        (request.q.shape[0], *request.q.shape[2:], *request.v.shape[2:]),
        request.options._replace(backend=name),
        request.exact_out,
        request.output is not None and request.output.dlse is not None,
        id(request) if alone else None,
    )


@torch.no_grad()
def compute(requests: Sequence[Request], device: torch.device) -> list[list[Tensor]]:
    """Compute requests, all of one kind, and return their results on the device.

    The result of a forward request is (out, lse). out is (B, Tq, Hq, Dv) in q's dtype or, if the
    request has `exact_out`, in the accumulator's dtype, which is fp64 for fp64 operands and
    otherwise fp32. lse is (B, Tq, Hq) in the accumulator's dtype. The result of a backward request
    is (dq, dk, dv), with the shapes of q, k and v, in the accumulator's dtype.
    """
    first = requests[0]
    options = first.options._replace(backend=_backend_of(first, device))
    q_starts = _starts([x.q for x in requests])
    k_starts = _starts([x.k for x in requests])
    slices = _joined([x.slices for x in requests], q_starts, k_starts)
    q = _packed([x.q for x in requests], q_starts, device)
    k, v = (_packed([getattr(x, name) for x in requests], k_starts, device) for name in ("k", "v"))
    if first.output is None:
        results = _forward(q, k, v, slices, options, first.exact_out)
        starts = [q_starts, q_starts]
    else:
        outputs = [x.output for x in requests if x.output is not None]
        results = _backward(q, k, v, slices, options, outputs, q_starts)
        starts = [q_starts, k_starts, k_starts]
    rows = [[x.q.shape[1] if s is q_starts else x.k.shape[1] for s in starts] for x in requests]
    return [
        [
            y[:, s[i] : s[i] + n].contiguous()
            for y, s, n in zip(results, starts, counts, strict=True)
        ]
        for i, counts in enumerate(rows)
    ]


def _backend_of(request: Request, device: torch.device) -> str:
    if request.options.backend != DEFAULT:
        return request.options.backend
    if device.type == "cpu":
        return "aten"
    q, k, v = (x[:, :0].to(device) for x in (request.q, request.k, request.v))
    return default_backend(q, k, v, request.slices, request.options)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions, exact_out: bool
) -> list[Tensor]:
    exact = accumulator_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=exact if exact_out else q.dtype)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=exact)
    return list(attend_blocks(q, [(k, v)], Blocks((slices,)), options, None, into=(out, lse)))


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    options: CallOptions,
    outputs: Sequence[OutputGradient],
    starts: Sequence[int],
) -> list[Tensor]:
    def packed(name: str) -> Tensor | None:
        rows = [getattr(x, name) for x in outputs]
        return None if rows[0] is None else _packed(rows, starts, q.device)

    dout, lse, delta = packed("dout"), packed("lse"), packed("delta")
    assert dout is not None and lse is not None
    output = OutputGradient(dout, None, lse, packed("dlse"), delta)
    gradients = PartialGradients.zeros(q, k, v)
    attend_backward(output, q, k, v, slices, gradients, options)
    return [gradients.dq, gradients.dk, gradients.dv]


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return the first row of each tensor (B, rows, …) in the concatenation.

    The last element is the total number of rows.
    """
    if len(tensors) == 1 and len(tensors[0]) == 1:
        return [0, tensors[0].shape[1]]  # nothing follows that must be aligned
    return list(accumulate((-(-x.shape[1] // _ROWS) * _ROWS for x in tensors), initial=0))


def _packed(tensors: Sequence[Tensor], starts: Sequence[int], device: torch.device) -> Tensor:
    """Concatenate tensors to (B, rows, …), so that tensor i begins at row starts[i].

    The rows between two tensors are zeros. A single tensor is not copied if it is on the device
    already, is aligned, and needs no zeros. For a GPU, tensors of the host are concatenated in
    pinned memory, so that the host need not wait for the copy to the GPU.
    """
    batch, rows, *rest = tensors[0].shape
    if len(tensors) == 1 and rows == starts[-1] and tensors[0].device == device:
        alone = tensors[0].contiguous()
        if alone.data_ptr() % _ALIGNMENT == 0:
            return alone
    shape, dtype = (batch, starts[-1], *rest), tensors[0].dtype
    if device.type == "cuda" and tensors[0].device.type == "cpu":
        result = host_memory(shape, dtype, pinned=True)
    else:
        result = torch.empty(shape, dtype=dtype, device=device)
    for x, (start, stop) in zip(tensors, pairwise(starts), strict=True):
        end = start + x.shape[1]
        result[:, start:end] = x
        result[:, end:stop] = 0
    return result.to(device, non_blocking=True)


def _joined(parts: Sequence[Slices], q_starts: Sequence[int], k_starts: Sequence[int]) -> Slices:
    if [q_starts[-1], k_starts[-1]] == [parts[0].query_rows, parts[0].key_rows]:
        return parts[0]  # this object keeps the tables that backends have derived from it

    def positions(arrays: Sequence[np.ndarray], starts: Sequence[int]) -> np.ndarray:
        result = np.zeros(starts[-1], dtype=np.int32)
        for array, start in zip(arrays, starts, strict=False):
            result[start : start + array.size] = array
        return result

    return Slices(
        np.concatenate([x.q_rows + n for x, n in zip(parts, q_starts, strict=False)]),
        np.concatenate([x.k_rows + n for x, n in zip(parts, k_starts, strict=False)]),
        np.concatenate([x.bands for x in parts]),
        positions([x.q_positions for x in parts], q_starts),
        positions([x.k_positions for x in parts], k_starts),
        np.empty((0, 2), np.int64),
    )


def hardware_of(device: torch.device) -> str:
    """Return a description of a device. Processes with equal descriptions compute the same bits.

    The description of a CPU includes the number of threads, because the bits of MKL's matrix
    products depend on this number unless MKL_CBWR makes them reproducible.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{device.type} with {capability} and {threads} thread{'s' * (threads > 1)}"
