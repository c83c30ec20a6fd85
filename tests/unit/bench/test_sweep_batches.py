"""Batches of a sweep: lengths of documents, masks, operands, and attention by the formulas."""

import numpy as np
import pytest
import torch

from seqpar.bench.workers import oracle
from seqpar.bench.workloads.sweep_batches import COLLECTIONS, KINDS, PackedBatch, draw, parse


@pytest.mark.parametrize("collection", COLLECTIONS)
@pytest.mark.parametrize("tokens", [1, 5, 1000, 200_000])
def test_documents_cover_all_tokens_and_are_repeatable(collection, tokens):
    lengths = draw(collection, tokens)
    assert lengths.sum() == tokens and lengths.min() >= 1
    np.testing.assert_array_equal(lengths, draw(collection, tokens))
    if collection == "magi":
        assert lengths.max() <= max(1, tokens // 4)


def test_documents_are_as_long_as_published():
    for collection, (edges, counts) in COLLECTIONS.items():
        assert len(edges) == len(counts) + 1 and (np.diff(edges) > 0).all()
        lengths, shares = draw(collection, 4_000_000), np.cumsum(counts) / sum(counts)
        median = np.interp(0.5, np.r_[0, shares], edges)
        assert np.median(lengths) == pytest.approx(median, rel=0.05)
        short = np.searchsorted(edges[1:], 2048, side="right")
        assert (lengths <= edges[short]).mean() == pytest.approx(shares[short - 1], abs=0.01)


NAMES = [*KINDS, "window:3", "full-window:2", "prefix:5", "window:0", "prefix:999"]


@pytest.mark.parametrize("name", [*NAMES, *(f"{kind}-magi" for kind in KINDS)])
def test_the_area_is_that_of_the_definitions(name):
    batch, place = PackedBatch.of(name, 60), torch.arange(60)
    seen = batch.visible(place, place)
    assert batch.area == seen.sum() and seen.any(1).all()
    assert batch.plain == (name in ("causal", "full"))


def test_what_each_mask_shows():
    place = torch.arange(6)
    rows = {
        "causal": (3, "111100"), "full": (3, "111111"), "window:1": (3, "001100"),
        "full-window:1": (3, "001110"), "prefix": (0, "111000"), "prefix:5": (1, "111110"),
    }  # fmt: skip
    for name, (query, expected) in rows.items():
        seen = PackedBatch.of(name, 6).visible(place, place)[query]
        assert "".join(map(str, seen.int().tolist())) == expected, name


@pytest.mark.parametrize("name", [
    "casual", "", "causal:4", "window:", "window:-1", "window:x", "causal-piles", "full-magi:3",
    "-pile", "window:1234567890123",
])  # fmt: skip
def test_masks_that_are_none_are_named(name):
    with pytest.raises(ValueError, match="masks"):
        parse(name)


def test_operands_are_the_same_whoever_draws_them():
    everything = oracle.draw(oracle.K, torch.arange(9000), 2, 4, torch.bfloat16)
    some = torch.tensor([8999, 0, 4096, 4095, 17])
    assert torch.equal(oracle.draw(oracle.K, some, 2, 4, torch.bfloat16), everything[some])
    assert not torch.equal(oracle.draw(oracle.V, some, 2, 4, torch.bfloat16), everything[some])


@pytest.mark.parametrize("name", ["causal", "full-magi", "prefix", "window:7"])
def test_the_formulas_are_attention(name):
    batch = PackedBatch.of(name, 40)
    q, k, v, dout = (
        oracle.draw(i, torch.arange(40), heads, 8, torch.float64).requires_grad_()
        for i, heads in enumerate((4, 2, 2, 4))
    )
    place = torch.arange(40)
    bias = torch.zeros(40, 40).double().masked_fill(~batch.visible(place, place), -torch.inf)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=bias, enable_gqa=True
    ).transpose(0, 1)
    expected = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    with torch.no_grad():
        found = oracle.attention(batch, q, k, v, dout)
        torch.testing.assert_close(found, [x.detach() for x in expected])
        some = torch.tensor([39, 3, 20])
        (rows,) = oracle.attention(batch, q[some], k, v, places=some)
        torch.testing.assert_close(rows, out[some].detach())


def test_errors_add_up_over_ranks():
    exact = [torch.full((2, 1, 4), 3.0), torch.full((2, 1, 4), 1.0)]
    found = [exact[0] + 1, exact[1]]
    parts = [oracle.sums(found, exact), oracle.sums(exact, exact)]
    assert oracle.add(parts) == (
        {"out": pytest.approx(0.5**0.5), "dq": 0.0},
        {"out": 3.0, "dq": 1.0},
    )


def test_what_is_wrong_is_named():
    found = {"out": 1.0, "dq": 2.0}
    assert oracle.wrong(found, {"out": 1.0, "dq": 1.5}, 1.35) is None
    assert "RMS error of dq, 2.0e+00, is 2.00 times" in oracle.wrong(
        found, {"out": 1.0, "dq": 1.0}, 1.35
    )
    assert oracle.wrong({"out": float("nan")}, {"out": 1.0}, 1.35) is not None
