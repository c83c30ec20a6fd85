"""The dtypes in which ranks send each other the results of blocks.

A kernel of FlashAttention rounds its results to half precision. If a single call returned a block's
result, it travels as the kernel returned it, with half of the bytes. fp32 represents each number of
bf16 and fp16, so the sums of the receiver have the same bits as if the result travelled in fp32. A
result that several calls returned is their sum, and travels in the accumulator's dtype. So do the
results of our Triton kernels and of kernels on CPUs, which compute in fp32.

The receiver must know the dtype before the message arrives. It follows from the mask and the layout
(`is_one_call`), which are the same on all ranks, and from the kernel (`result_dtypes`). Ranks
compare their kernels once, in the first forward on GPUs in half precision. If GPUs or installed
packages differ, all results travel in the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from seqpar.comm.messages.comm import Comm
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask, Slices
from seqpar.softmax.backends.kernel_order import described_kernels, preferred_kernel
from seqpar.softmax.backends.varlen import HeadDims, varlen_work
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.compute.call_options import CallOptions


class ResultDtypes(NamedTuple):
    """The dtypes of results that one kernel call returned, and of those that several returned."""

    of_one_call: torch.dtype
    of_several: torch.dtype

    def of(self, is_one_call: Callable[[], bool]) -> torch.dtype:
        """Return the dtype of a result. `is_one_call` is only called if the two dtypes differ."""
        if self.of_one_call != self.of_several and is_one_call():
            return self.of_one_call
        return self.of_several


def result_dtypes(
    comm: Comm | None, call: ResolvedCall, backward: bool, chosen: torch.dtype | None = None
) -> ResultDtypes:
    """Return the dtypes of partial results or, with `backward`, of gradients.

    They are the same on all ranks of `comm`. Without `comm`, the ranks are assumed to have the same
    kernels. `chosen` is the dtype that the user has chosen for all results, if any.
    """
    exact = accumulator_dtype(call.shape.dtype)
    may_be_half = ranks_have_equal_kernels(comm, call)
    if chosen is not None:
        return ResultDtypes(chosen, chosen)
    if not may_be_half:
        return ResultDtypes(exact, exact)
    has_slopes = call.options.slopes is not None

    def find() -> torch.dtype:
        dtype, *_, dim, value_dim = call.shape
        return dtype_of_one_call(
            HeadDims(dtype, dim, value_dim), call.options, call.device, backward
        )

    return ResultDtypes(call.once(("result dtype", backward, has_slopes), find), exact)


def ranks_have_equal_kernels(comm: Comm | None, call: ResolvedCall) -> bool:
    """Return whether all ranks compute the call with equal kernels that may return half precision.

    Every forward calls this function, whatever dtypes the user has chosen, so that only the first
    forward on a group sends messages for the comparison. A CUDA graph that captures a later pass
    could not contain the comparison, because the CPU reads its result.
    """
    dtype = call.shape.dtype
    # Triton computes layouts with `most_documents`.
    if dtype == accumulator_dtype(dtype) or call.layout.cut.most_documents:
        return False
    if comm is None or call.device.type != "cuda":
        return True
    return comm.have_equal("kernels of attention", described_kernels(call.device))


def dtype_of_one_call(
    operands: HeadDims, options: CallOptions, device: torch.device, backward: bool
) -> torch.dtype:
    """Return the dtype of a result that one kernel call returns, if ranks have equal kernels."""
    kernel = preferred_kernel(operands, options, device)
    if kernel is None or (backward and options.deterministic and not kernel.deterministic):
        return accumulator_dtype(operands.dtype)  # our Triton kernels or several kernels compute
    return operands.dtype


def is_one_call(slices: Slices, backward: bool) -> bool:
    """Return whether a kernel of FlashAttention computes the slices in one call."""
    calls, remaining = varlen_work(slices, repeats_keys=not backward)
    return len(calls) == 1 and remaining is None


def hops_are_one_call(queries: Geometry, keys: Geometry, mask: Mask) -> bool:
    """Return whether `is_one_call` is known of the slices between any two different ranks.

    If so, no rank needs to build slices of other ranks. On contiguous and zigzag layouts, a rank's
    queries of a document attend to adjacent keys of another rank, and all of them attend to the
    same keys. Without a mask they attend to all keys on any layout.
    """
    has_others = mask.prefix is not None or mask.ranges is not None
    if queries is not keys or mask.left != UNLIMITED or has_others:
        return False
    cut = queries.cut
    is_cut_evenly = cut.most_spans == 1 or cut.mirrored_edges(np.zeros(0, np.int64)) is not None
    return mask.right == UNLIMITED or (mask.right == 0 and is_cut_evenly)
