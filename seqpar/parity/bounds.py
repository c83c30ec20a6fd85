"""How far two correct runs of a model can differ because of rounding.

Consider an operation that sums K products in an accumulator with the unit roundoff a, and rounds
the result to a dtype with the unit roundoff u. The relative error of the result is about u + a·√K,
because rounding errors are independent and add up like a random walk. Two runs that do the same
operation with different orders of summation therefore differ by about this error. Later operations
keep the difference and add errors of the same size, so the results of the n-th operation of a step
differ by about √n·(u + a·√K). The bound is `MARGIN` times this number.

The derivation assumes that operations do not enlarge relative differences, on average over a
token's features. If the operations of a model enlarge differences, for example because attention
scores are very large, correct runs exceed the bound. For such a model, record the first run twice,
with different orders of summation, and pass the second recording to `compare` as `again`. The bound
is then `REPEATED_MARGIN` times the difference between these two recordings.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from seqpar.parity.summaries import size_edges

MARGIN = 4.0  # allows for the error of estimating a difference from a few projections
REPEATED_MARGIN = 4.0  # bound / difference between two recordings of one run


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of rounding to the dtype with this name."""
    return torch.finfo(getattr(torch, dtype)).eps / 2


def rounding_bound(operation: int, coarsest: float, summands: int) -> float:
    """Return the largest relative difference between two runs that rounding explains after
    `operation` operations.

    `coarsest` is the unit roundoff u of the least precise dtype so far, and `summands` is the
    number K of products that an operation sums; see the module's docstring.
    """
    accumulator = min(coarsest, unit_roundoff("float32"))
    one = coarsest + accumulator * math.sqrt(max(1, summands))
    return MARGIN * math.sqrt(max(1, operation)) * one


def update_bound(
    sizes: NDArray[np.float64], noise: float, coarsest: float, relative_update: float
) -> float:
    """Return the largest relative difference that rounding explains between two runs in the update
    of a weight.

    The update is what a step of the optimizer adds to the weight. An optimizer such as Adam divides
    an element's gradient by the typical size of this gradient, so the update of an element depends
    on the relative error of its gradient. If the gradient is smaller than its error `noise`, the
    update can have any sign, and the updates of two runs differ by up to twice their size. If the
    gradient is m times as large as its error, the update changes by up to 2/m of its size. Finally,
    the weight is rounded once.

    `sizes` (SIZE_BINS,) counts the elements by the sizes of their gradients. `relative_update` is
    the norm of the update divided by the norm of the weight.
    """
    changes = 2 * np.minimum(1.0, noise / size_edges())
    changed = math.sqrt(float(sizes @ np.square(changes)) / max(1.0, float(sizes.sum())))
    rounding = coarsest / relative_update if relative_update else math.inf
    return changed + MARGIN * rounding
