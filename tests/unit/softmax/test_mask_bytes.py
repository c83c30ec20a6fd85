"""What 25 kinds of masks cost in one call: each key goes once to each rank that sees it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from seqpar import Layout, Mask, masks
from tests.support.cases import module
from tests.support.mask_families import FAMILIES, TOKENS
from tests.support.ranks import virtual

RANKS, KV_HEADS, DIM = 4, 2, 8
ROW = 2 * KV_HEADS * DIM * 4  # bytes of a key and a value, fp32
LAYOUTS = {
    "zigzag": Layout.zigzag([0, TOKENS], RANKS),
    "contiguous": Layout.contiguous([0, TOKENS], RANKS),
    "striped": Layout.striped([0, TOKENS], RANKS),
}


def ranges_of(family):
    queries, keys, kinds = zip(*FAMILIES[family], strict=True)
    return masks.from_magi(queries, keys, kinds)


def sent(strategy, layout, lists):
    """Bytes of all ranks' forwards, for each list of ranges."""

    def on_rank(comm):
        attn, rows = module(strategy, comm), layout.tokens_on(comm.rank)
        q, k = (torch.empty(rows, heads, DIM, device="meta") for heads in (4, KV_HEADS))
        rows_of = [attn.traffic(q, k, k, layout, mask=Mask.of_ranges(ranges)) for ranges in lists]
        return [sum(x.bytes for x in rows if x.direction == "forward") for rows in rows_of]

    return np.sum(virtual(RANKS, on_rank), 0)


@pytest.mark.exhaustive
def test_the_guide_compares_one_call_with_several():
    guide = (Path(__file__).parents[3] / "docs/guides/masks.md").read_text()
    told = re.findall(
        r"^\| ([\w ,]+) \| ([\d,]+) \| ([\d.]+|–) \| ([\d,]+) \| ([\d.]+|–) \|$", guide, re.M
    )
    expected = []
    for family in FAMILIES:
        row = [family]
        for kind in ("zigzag", "striped"):
            each = [[x] for x in ranges_of(family)]
            once, *apart = sent("ring", LAYOUTS[kind], [ranges_of(family), *each])
            row += [f"{once // ROW:,}", f"{sum(apart) / once:.2f}" if once else "–"]
        expected.append(tuple(row))
    assert told == expected
