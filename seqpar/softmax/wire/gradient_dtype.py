"""Send contributions to gradients in bf16 instead of the accumulator's dtype.

A rank computes a contribution in the accumulator's dtype and rounds it once, before it is sent. The
owner adds the contributions of other ranks in the accumulator's dtype. bf16 has 8 significant bits,
so rounding changes an element by at most 1/256 of it (Higham, "Accuracy and Stability of Numerical
Algorithms", 2002, theorem 2.2). The additional error of a gradient is therefore at most 1/256 of
the sum of the absolute values of its rounded contributions. A rank's own are not rounded.
"""

from __future__ import annotations

import torch

from seqpar.core.arguments import shown


def check_gradient_dtype(gradient_dtype: torch.dtype | None) -> None:
    """Raise a ValueError unless it is bf16 or None, which means the accumulator's dtype."""
    if gradient_dtype is not None and gradient_dtype is not torch.bfloat16:
        expected = "None or torch.bfloat16"
        raise ValueError(f"gradient_dtype must be {expected}, got {shown(gradient_dtype)}")


def check_gradient_digits(gradient_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Raise a ValueError for bf16 gradients of fp64 tensors."""
    if gradient_dtype is not None and dtype == torch.float64:
        raise ValueError("gradient_dtype must be None with fp64, whose digits bf16 would lose")
