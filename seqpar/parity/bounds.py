"""How far two correct runs of a model can differ: rounding, from dtype and depth.

An operation that sums K products in an accumulator of unit roundoff a, and rounds its result to a
dtype of unit roundoff u, has a relative error of about u + a·√K, because its roundings are
independent and add like a random walk. Two runs that do the same operations in different orders
therefore differ by about this error. Later operations pass the difference on and add their own
errors, so the n-th operation of a step differs by about √n·(u + a·√K). The bound is `MARGIN` times
this difference.

The derivation assumes that an operation does not enlarge relative differences, on average over a
token's features. A model that does, such as one with very large attention scores, exceeds the
bound. For such a model, a second recording of the first run measures the bound.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from seqpar.parity.summaries import size_edges

MARGIN = 4.0  # a few projections only estimate the largest error of many tokens
REPEATED_MARGIN = 4.0  # factor from the difference of two recordings of one run to the bound


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of rounding to a dtype, by the dtype's name."""
    return torch.finfo(getattr(torch, dtype)).eps / 2


def rounding_bound(operation: int, coarsest: float, summands: int) -> float:
    """Return the relative difference that rounding explains after `operation` operations.

    `coarsest` is u, the unit roundoff of the least precise dtype that the operations used so far.
    `summands` is K, the number of products that an operation sums.
    """
    accumulator = min(coarsest, unit_roundoff("float32"))
    one = coarsest + accumulator * math.sqrt(max(1, summands))
    return MARGIN * math.sqrt(max(1, operation)) * one


def update_bound(
    sizes: NDArray[np.float64], noise: float, coarsest: float, relative_update: float
) -> float:
    """Return the relative difference that rounding explains in the update of a weight.

    The update is what a step of the optimizer adds to the weight. An optimizer such as Adam divides
    the gradient of an element by the gradient's own size. If the gradient is smaller than its error
    `noise`, the element's update may have any sign, so the updates of two runs differ by up to
    twice their size. If the gradient is m times as large as its error, the element's update changes
    by up to 2/m. After the update the weight is rounded once.

    `sizes` (SIZE_BINS,) counts the elements by the sizes of their gradients. `relative_update` is
    the norm of the update divided by the norm of the weight.
    """
    changes = 2 * np.minimum(1.0, noise / size_edges())
    changed = math.sqrt(float(sizes @ np.square(changes)) / max(1.0, float(sizes.sum())))
    rounding = coarsest / relative_update if relative_update else math.inf
    return changed + MARGIN * rounding
