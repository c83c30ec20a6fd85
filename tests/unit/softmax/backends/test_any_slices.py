"""Slices that no layout makes, with rows that see no key and keys that no row sees: such as come
from another process. The backend on CPUs computes what the definition says."""

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import aten, reference
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

OPTIONS = CallOptions(0.5, 0.0, "aten", True)
POSITIONS = st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True).map(sorted)


def slices_of(q_positions, k_positions, band):
    rows = [np.array([[0, len(x)]]) for x in (q_positions, k_positions)]
    positions = [np.array(x, np.int32) for x in (q_positions, k_positions)]
    return Slices(*rows, np.array([band]), *positions, np.empty((0, 2), np.int64))


def results(backend, slices):
    """out, lse, dq, dk and dv."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, n, 2, 4) for n in (slices.query_rows, slices.key_rows, slices.key_rows)]
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
    partial = Partial.nothing(q, v)
    backend.forward(q, k, v, slices, partial, OPTIONS)
    out, lse = partial.finish(None, torch.float64)
    gradients = PartialGradients.zeros(q, k, v)
    output = OutputGradient.of(out.cos(), None, out, lse, None)
    backend.backward(output, q, k, v, slices, gradients, OPTIONS)
    return out, lse, gradients.dq, gradients.dk, gradients.dv


@given(POSITIONS, POSITIONS, st.integers(-50, 20), st.integers(0, 60))
@example([5], list(range(20)), -50, 50)  # a row that does not see the last keys
@example([0, 1, 2], [1, 2], -50, 50)  # a row that sees none
@example([9], [20], -50, 50)
def test_any_band_over_any_positions(q_positions, k_positions, low, width):
    slices = slices_of(q_positions, k_positions, (low, low + width))
    for x, y in zip(results(aten, slices), results(reference, slices), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
