"""Malformed arguments of what layouts and masks offer: each error names the argument, at once."""

import numpy as np
import pytest
import torch

import seqpar
from seqpar import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask
from tests.support.tiers import few_rows

LAYOUT = Layout.zigzag([0, 3, 8], 2)
IDS = torch.arange(8)
BAD_CU_SEQLENS = {
    "ragged": [[0, 1], [2]],
    "floats": torch.tensor([0.0, 8.0]),
    "bfloat16": torch.tensor([0, 8], dtype=torch.bfloat16),
    "bools": [False, True],
    "complex": torch.tensor([0, 8 + 0j]),
    "on meta": torch.zeros(2, dtype=torch.long, device="meta"),
    "0-D": torch.tensor(8),
    "2-D": [[0, 8]],
    "none": None,
    "text": "08",
    "a set": {0, 8},
    "above int64": [0, 2**63 + 8],
    "far above int64": [0, 2**70],
    "an int above int64": 2**70,
    "unsigned above int64": np.array([0, 2**63 + 8], dtype=np.uint64),
    "long": 2**31,
    "a long document": [0, 2**31],
    "wrapping lengths": [0, 2**62, -(2**62), 2**62],
    "long in all": np.arange(2**10 + 1) * (2**31 - 1),
}
TAKE_CU_SEQLENS = {
    "contiguous": lambda cu: Layout.contiguous(cu, 2),
    "zigzag": lambda cu: Layout.zigzag(cu, 2),
    "striped": lambda cu: Layout.striped(cu, 2),
    "from_spans": lambda cu: Layout.from_spans([[(0, 0, 8)]], cu),
    "shift_labels": lambda cu: seqpar.shift_labels(IDS, cu),
}
MALFORMED = {
    "ranks 10**9": (lambda: Layout.contiguous(10, ranks=10**9), "ranks must be at most"),
    "ranks 10**8": (lambda: Layout.zigzag(10, 10**8), "ranks must be at most"),
    "ranks 2**70": (lambda: Layout.striped(10, 2**70), "ranks must be at most"),
    "ranks none": (lambda: Layout.striped(10, None), "ranks must be an integer"),
    "ranks list": (lambda: Layout.zigzag(10, [2]), "ranks must be an integer"),
    "stripe float": (lambda: Layout.striped(10, 2, 1.0), "stripe must be an integer"),
    "rank 10**5000": (lambda: Layout.zigzag(8, 2).spans(10**5000), "rank must be below"),
    "pairs": (lambda: Layout.from_spans([[(0, 0), (3, 0), (3, 8)]], 8), "spans_per_rank.*triples"),
    "fours": (lambda: Layout.from_spans([[(0, 0, 8, 0)] * 3], 8), "spans_per_rank.*triples"),
    "an int": (lambda: Layout.from_spans(5, 8), "spans_per_rank"),
    "ints": (lambda: Layout.from_spans([5], 8), "spans_per_rank"),
    "flat": (lambda: Layout.from_spans([[0, 0, 8]], 8), "spans_per_rank"),
    "text": (lambda: Layout.from_spans([["abc"]], 8), "spans_per_rank"),
    "ragged": (lambda: Layout.from_spans([[(0, 0, [8])]], 8), "spans_per_rank"),
    "huge span": (lambda: Layout.from_spans([[(0, 0, 2**70)]], 8), "spans_per_rank"),
    "wrapping span": (lambda: Layout.from_spans([[(0, 0, 2**63)]], 8), "spans_per_rank"),
    "spans rank": (lambda: LAYOUT.spans("0"), "rank must be an integer"),
    "tokens_on rank": (lambda: LAYOUT.tokens_on(2**70), "rank must be below"),
    "indices rank": (lambda: LAYOUT.token_indices(None), "rank must be an integer"),
    "position_ids rank": (lambda: LAYOUT.position_ids(0.0), "rank must be an integer"),
    "device": (lambda: LAYOUT.position_ids(0, device="nope"), "device must be"),
    "device list": (lambda: LAYOUT.token_indices(0, device=["cpu"]), "device must be"),
    "device absent": (lambda: LAYOUT.token_indices(0, device="hpu:3"), "device must be"),
    "shard list": (lambda: LAYOUT.shard([0] * 8, 0), "x must be a tensor, got list"),
    "shard array": (lambda: LAYOUT.shard(np.arange(8), 0), "x must be a tensor, got ndarray"),
    "shard 0-D": (lambda: LAYOUT.shard(torch.tensor(8), 0), "x must have 8 tokens"),
    "shard dim": (lambda: LAYOUT.shard(IDS, 0, dim=3), "x must have 8 tokens .* along dim 3"),
    "shard dim text": (lambda: LAYOUT.shard(IDS, 0, dim="0"), "dim must be an integer"),
    "shard dim none": (lambda: LAYOUT.shard(IDS, 0, dim=None), "dim must be an integer"),
    "shard dim 10**5000": (lambda: LAYOUT.shard(IDS, 0, dim=10**5000), "dim must be at most"),
    "shard value 10**5000": (
        lambda: Layout.zigzag(7, 2, equal=True).shard(torch.zeros(7), 0, value=10**5000),
        "value must be a number",
    ),
    "shard value tuple": (
        lambda: Layout.zigzag(7, 2, equal=True).shard(IDS[:7], 0, value=(1,)),
        "value must be a number",
    ),
    "shard rank": (lambda: LAYOUT.shard(IDS, 2), "rank must be below"),
    "unshard list": (lambda: LAYOUT.unshard([1], None), "x_local must be a tensor"),
    "unshard dim": (lambda: LAYOUT.unshard(IDS, None, dim=0.5), "dim must be an integer"),
    "path": (lambda: LAYOUT.plot(5), "path must be"),
    "mask path": (lambda: Mask(3, 0).plot(None, LAYOUT), "path must be"),
    "mask layout": (lambda: Mask(3, 0).plot("mask.png", 8), "layout must be"),
    "window int": (lambda: Mask.of(True, 5, None, LAYOUT.geometry), "window_size must be"),
    "window float": (
        lambda: Mask.of(True, (1.5, 0), None, LAYOUT.geometry),
        "window_size.*integer",
    ),
    "padding device": (lambda: LAYOUT.padding(0, device="nope"), "device must be"),
    "ids list": (lambda: seqpar.shift_labels([1] * 8, 8), "ids must be a tensor"),
    "ids 0-D": (lambda: seqpar.shift_labels(torch.tensor(8), 8), "ids must have the 8 tokens"),
    **{
        f"ids {dtype}": (
            lambda d=dtype: seqpar.shift_labels(IDS.to(d), 8),
            "ids must be of a signed",
        )
        for dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64)
    },
}


@few_rows(pairs=False)
@pytest.mark.parametrize("wrong", BAD_CU_SEQLENS)
@pytest.mark.parametrize("taker", TAKE_CU_SEQLENS)
def test_malformed_cu_seqlens_are_named(taker, wrong):
    with pytest.raises(ValueError, match="cu_seqlens"):
        TAKE_CU_SEQLENS[taker](BAD_CU_SEQLENS[wrong])


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_argument_is_named(case):
    call, message = MALFORMED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_numpy_integers_are_taken_where_integers_are():
    layout = Layout.striped(np.uint32(8), np.int64(2), np.int16(3))
    assert layout == Layout.striped(np.array([0, 8], np.uint64), 2, 3)
    x = layout.shard(IDS, np.int32(1), np.int8(-1))
    assert torch.equal(x, layout.token_indices(np.uint8(1)))
    assert layout.spans(np.int64(1)) == layout.spans(1)
    assert layout.tokens_on(np.int64(1)) == layout.tokens_on(1)
    assert Layout.striped(8, 2, stripe=2**70) == Layout.striped(8, 2, stripe=8)


def test_windows_above_every_position_are_unlimited():
    assert Mask.of(True, (2**63 - 1, 0), None, LAYOUT.geometry) == Mask(UNLIMITED, 0)
