"""The recurrent primitive against each token's formula in fp64: results, gradients and maps."""

import pytest
import torch

from seqpar.recurrent.kinds import KINDS
from tests.support.recurrent_cases import RecurrentCase, oracle, run

HEADS = [(2, 2, 2), (4, 2, 2), (1, 2, 4), (2, 4, 1)]  # of q, k and v
STATES = [(None, None), ((1, 0, 1, 0), (0, 1, 1, 0)), ((0, 0, 0, 0), (0, 0, 0, 0))]


def assert_exact(case, local=False):
    expected, found = oracle(case), run(case, local)
    for name, y in expected.items():
        if y.numel():
            assert found[name].dtype == (torch.float64 if case.dtype == torch.float64 else None)
            torch.testing.assert_close(found[name], y, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("backend", ["reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_in_fp64(kind, backend):
    for index, heads in enumerate(HEADS):
        entered, left = STATES[index % len(STATES)]
        q_heads, k_heads, v_heads = heads
        case = RecurrentCase(
            kind, entered=entered, left=left, backend=backend,
            q_heads=q_heads, k_heads=k_heads, v_heads=v_heads,
        )  # fmt: skip
        assert_exact(case, local=bool(index % 2))
