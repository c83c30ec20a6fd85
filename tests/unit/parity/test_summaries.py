"""Summaries of blocks add up, projections estimate distances, and orders place tokens."""

import numpy as np
import pytest
import torch

from seqpar.parity.compare import distances
from seqpar.parity.sharding import Batch, found_order, positions_of, token_rows
from seqpar.parity.summaries import count_sizes, size_edges, summarise, summarise_block


def test_summaries_of_blocks_add_up():
    x = torch.randn(10, 6, 3, dtype=torch.float64)
    blocks = [(slice(0, 4), slice(0, 6)), (slice(4, 10), slice(0, 2)), (slice(4, 10), slice(2, 6))]
    parts = [
        summarise_block(x[rows, columns], (rows.start, columns.start, 0))
        for rows, columns in blocks
    ]
    assert torch.allclose(sum(parts), summarise_block(x, (0, 0, 0)))
    assert torch.allclose(summarise_block(x)[0], x.square().sum())


def test_sizes_are_counted_without_zeros():
    x = torch.tensor([[0.0, 1.0, -1.9], [2.0, 1e-45, torch.inf]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        counts = dict(zip(size_edges(), count_sizes(x.to(dtype)).tolist(), strict=True))
        assert counts[1.0] == 2 and counts[2.0] == 1 and sum(counts.values()) == 3


def test_projections_estimate_how_far_rows_are_apart():
    torch.manual_seed(0)
    x, y = torch.randn(2, 400, 64)
    found = distances(summarise(x).numpy(), summarise(y).numpy())
    ratios = found / (x - y).double().norm(dim=1).numpy()
    assert np.mean(ratios**2) == pytest.approx(1, rel=0.1) and ratios.min() > 0.05
    assert not distances(summarise(x).numpy(), summarise(x.clone()).numpy()).any()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 6, 8), (2, 6, 8)),
        ((6, 2, 8), (2, 6, 8)),
        ((12, 8), (2, 6, 8)),
        ((2, 3, 6, 4), (2, 6, 12)),
        ((1, 6, 4), (1, 6, 4)),
        ((5, 8), None),
        ((2,), None),
        ((2, 6), (2, 6, 1)),
        ((12, 3, 4), (2, 6, 12)),
    ],
)
def test_the_dimensions_of_tokens_are_found(shape, expected):
    rows = token_rows(torch.zeros(shape), Batch(2, 6))
    assert (None if rows is None else tuple(rows.shape)) == expected


def test_a_rank_may_have_no_tokens():
    assert token_rows(torch.zeros(1, 0, 8), Batch(1, 0)).shape == (1, 0, 8)
    assert summarise(torch.zeros(0, 8)).shape == (0, 6)


def test_orders_are_found_from_ids():
    ids = np.arange(100, 116)[None]
    for order in ("contiguous", "head_tail", "striped"):
        parts = [ids[:, x] for x in positions_of(order, [8, 8])]
        found = found_order(parts, [None, None], ids)
        assert found is not None and found[0] == order
    assert found_order([ids[:, ::2][:, ::-1], ids[:, 1::2]], [None, None], ids) is None
    with pytest.raises(ValueError, match="head_tail needs an equal, even number"):
        positions_of("head_tail", [3, 3])
