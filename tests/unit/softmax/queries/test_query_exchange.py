"""TokenRing's visits: groups of heads, messages, and the halves of a rank's own slices."""

import dataclasses
from collections import Counter

import pytest
import torch

from seqpar import Layout
from seqpar.softmax.keys import key_plan
from tests.support.cases import Case, assert_right, module, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


@pytest.fixture
def small(monkeypatch):
    """Rows for a group of heads, and for a tile, that small cases have."""
    monkeypatch.setattr(key_plan, "_ROWS_PER_GROUP", 4)
    monkeypatch.setattr(key_plan, "_ROWS_PER_SHORT_GROUP", 8)
    monkeypatch.setattr("seqpar.layout.masks.mask._TILE_ROWS", 2)


@few_rows()
@pytest.mark.parametrize("options", [
    {},
    {"batch": 2, "sinks": True, "dlse": True},
    {"window": (9, 2), "dtype": torch.float32, "value_dim": 5, "alibi": "heads"},
    {"prefix": (30, 0, 1, 5), "causal": False, "heads": 3, "kv_heads": 3},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_groups_of_heads_and_halves_change_no_result(small, kind, options):
    layout = getattr(Layout, kind)([0, 41, 42, 50, 121], 3)
    case = Case("token_ring", layout, **{"causal": True, "heads": 6, "kv_heads": 3} | options)
    for got in virtual(3, run, case):
        assert_right(got, oracle(case), case.dtype)


def test_mesh_ranks_may_have_fewer_head_groups():
    case = Case("usp+token_ring", Layout.zigzag(31, 4), causal=True, heads=3, kv_heads=3)
    for got in virtual(4, run, case):
        assert_right(got, oracle(case), case.dtype)


def messages(comm, case):
    """How many messages `traffic` says that a rank sends in each pass, and how many it sends."""
    attn, found = module(case.strategy, comm), Counter()
    q, k, v = (case.layout.shard(x, comm.rank) for x in case.inputs()[:3])
    for row in attn.traffic(q, k, v, case.layout, causal=case.causal):
        found[row.direction] += row.messages
    run(comm, case)
    return found


def test_each_group_of_heads_has_its_messages(small):
    case = Case("token_ring", Layout.contiguous(30, 2), causal=False, heads=8, kv_heads=4)
    groups = 15 // 4
    for found in virtual(2, messages, case):
        assert found == {"forward": 2 * groups, "backward": 2 * groups}


def test_contiguous_rows_are_sent_without_a_copy():
    """What travels in backward is three messages then, and else one."""
    one_range = Case("token_ring", Layout.contiguous(32, 2), causal=False)
    several = dataclasses.replace(one_range, layout=Layout.zigzag([0, 10, 32], 2), causal=True)
    assert virtual(2, messages, one_range) == [{"forward": 2, "backward": 4}] * 2
    first, second = virtual(2, messages, several)
    assert {first["backward"], second["backward"]} == {2, 4}
