"""What is not finite in one document, or span, of linear attention's kernels stays there."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.kernels.lightning_cases import NAMES, Operands, spans_of


def test_garbage_in_another_document_does_not_leak():
    """NaN in the rows of neighbours, on both sides, reaches neither results nor gradients."""
    spans, alone = spans_of([19, 21, 18]), spans_of([21])
    x = Operands.draw(spans)
    for name in ("q", "k", "v", "dout"):
        getattr(x, name)[:, :19] = torch.nan
        getattr(x, name)[:, 40:] = torch.nan
    y = dataclasses.replace(
        x, **{name: getattr(x, name)[:, 19:40] for name in ("q", "k", "v", "dout")}
    )
    got, expected = x.computed(spans, 16), y.computed(alone, 16)
    for i in (0, 2, 3, 4):
        assert torch.equal(got[i][:, 19:40], expected[i])  # the bits that the document has alone


@pytest.fixture(scope="module", params=[True, False])
def finite(request):
    """Three spans, operands, what is computed of them, and whether that is causal."""
    edges, every, causal = [0, 19, 40, 58], [True] * 3, request.param
    spans = spans_of(np.diff(edges), every, every)
    x = Operands.draw(spans, decay=None if not causal else (-3.0,))
    return edges, spans, x, x.computed(spans, 16, causal=causal), causal


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "initial", "dfinal"])
def test_what_is_not_finite_stays_in_its_span(name, finite):
    """A NaN in the rows or states of one span; results and states of the others keep their bits."""
    edges, spans, x, expected, causal = finite
    y = dataclasses.replace(x, **{name: getattr(x, name).clone()})
    if name in ("initial", "dfinal"):
        getattr(y, name)[spans.state_in[1], ..., 3, 5] = torch.nan
    else:
        getattr(y, name)[:, 25, :, 3] = torch.nan
    got = y.computed(spans, 16, causal=causal)
    assert not all(z.isfinite().all() for z in got)
    others = np.r_[: edges[1], edges[2] : edges[3]]
    for i in (0, 2, 3, 4):
        assert torch.equal(got[i][:, others], expected[i][:, others]), NAMES[i]
    for i in (1, 5):
        assert torch.equal(got[i][spans.state_in[[0, 2]]], expected[i][spans.state_in[[0, 2]]])
