"""The dtypes in which ranks send results of attention, and gradients, back to each other.

A kernel of FlashAttention rounds its results to half precision. If a single call of such a kernel
computed a result, the result is sent in half precision, as the kernel returned it. All other
results are sent in the accumulator's dtype, which is fp32 (fp64 for fp64).

The receiver must know the dtype before the message arrives. It therefore needs two facts:

* whether a single kernel call computes the result (`is_one_call`). The answer follows from the mask
  and the layouts, which are the same on all ranks.
* whether the kernel returns half precision (`result_dtypes`). The answer follows from the GPU and
  the installed packages. Ranks compare their kernels once, in the first forward on GPUs in half
  precision. If the kernels of the ranks differ, all results are sent in the accumulator's dtype.
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
    """The dtypes in which results are sent.

    One is for results of a single kernel call, and one is for sums of the results of several calls.
    """

    of_one_call: torch.dtype
    of_several: torch.dtype

    def of(self, is_one_call: Callable[[], bool]) -> torch.dtype:
        """Return the dtype of a result. `is_one_call` is called only if the two dtypes differ."""
        if self.of_one_call != self.of_several and is_one_call():
            return self.of_one_call
        return self.of_several


def result_dtypes(
    comm: Comm | None, call: ResolvedCall, backward: bool, chosen: torch.dtype | None = None
) -> ResultDtypes:
    """Return the dtypes in which ranks send partial results in forward, or gradients in backward.

    All ranks of `comm` get the same dtypes. Without `comm`, the function assumes that all ranks
    have the same kernels. `chosen` is a dtype that the user has chosen for all results, or None.
    """
    exact = accumulator_dtype(call.shape.dtype)
    # Called in every forward, even if the dtype is chosen. Without this, the first comparison could
    # be in a pass that a CUDA graph captures, and a capture cannot contain the comparison.
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
    """Return whether all ranks have the same kernels, so that results may be sent in half
    precision.

    The result is False for a dtype or layout whose kernels do not return half precision. The ranks
    compare their kernels in their first forward. No later forward or backward sends messages for
    the comparison.
    """
    dtype = call.shape.dtype
    # Our Triton kernels compute layouts with `most_documents`, and do not return half precision.
    if dtype == accumulator_dtype(dtype) or call.layout.cut.most_documents:
        return False
    if comm is None or call.device.type != "cuda":
        return True
    return comm.have_equal("kernels of attention", described_kernels(call.device))


def dtype_of_one_call(
    operands: HeadDims, options: CallOptions, device: torch.device, backward: bool
) -> torch.dtype:
    """Return the dtype of the result of a single kernel call.

    The function assumes that all ranks have the same kernels.
    """
    kernel = preferred_kernel(operands, options, device)
    if kernel is None or (backward and options.deterministic and not kernel.deterministic):
        # Our Triton kernels, or several kernel calls, compute the result.
        return accumulator_dtype(operands.dtype)
    return operands.dtype


def is_one_call(slices: Slices, backward: bool) -> bool:
    """Return whether one call of a FlashAttention kernel can compute all of the slices."""
    calls, remaining = varlen_work(slices, repeats_keys=not backward)
    return len(calls) == 1 and remaining is None


def hops_are_one_call(queries: Geometry, keys: Geometry, mask: Mask) -> bool:
    """Return True if, for any two ranks, one kernel call surely computes one rank's queries over
    the other rank's keys.

    The result is True for a full mask, and for a causal mask on contiguous and zigzag layouts. In
    all other cases, `is_one_call` answers the question for two given ranks.
    """
    has_others = mask.prefix is not None or mask.ranges is not None
    if queries is not keys or mask.left != UNLIMITED or has_others:
        return False
    cut = queries.cut
    is_cut_evenly = cut.most_spans == 1 or cut.mirrored_edges(np.zeros(0, np.int64)) is not None
    return mask.right == UNLIMITED or (mask.right == 0 and is_cut_evenly)
