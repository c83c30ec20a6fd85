"""In which precision this CPU computes half-precision attention best."""

from __future__ import annotations

from functools import cache

import torch

from seqpar.core.torch_private import cpu_has_bf16_products, cpu_has_matrix_units

# Up to so many queries of a document ATen's backward rounds dk and dv in half precision once, on
# one device. Ours would round each rank's contribution, and then their sum. With twice as many,
# what ATen rounds is worse than that, and at 1,152, of which it rounds two parts, as bad.
_ROUNDED_ONCE = 1536


def computes_forward(dtype: torch.dtype) -> bool:
    """Return whether forward is faster in this half precision than in fp32, casts included."""
    return dtype == torch.bfloat16 and cpu_has_matrix_units()


def computes_backward(dtype: torch.dtype, query_end: int) -> bool:
    """Return whether backward is faster in this half precision, and errs no more than it may.

    `query_end` is the position behind that of the last query.
    """
    return query_end > _ROUNDED_ONCE and dtype == torch.bfloat16 and _backward_is_faster()


@cache
def _backward_is_faster() -> bool:
    """Intel's bf16 products take longer than fp32's, but for those of matrix units."""
    return cpu_has_matrix_units() or (cpu_has_bf16_products() and _vendor() != "GenuineIntel")


def _vendor() -> str:
    """Return who made this CPU, as Linux says, or "" where it does not."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
