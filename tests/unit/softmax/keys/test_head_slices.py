"""Ring and AllGather on ranks with many rows: heads travel in groups, each with its messages."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from seqpar import Layout
from seqpar.attention.operands import OperandShape
from seqpar.layout.masks.mask import UNLIMITED, Mask
from seqpar.softmax.heads.head_exchange import HeadGroups
from seqpar.softmax.keys import key_plan
from tests.support.cases import Case, assert_right, module, oracle, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

CU = [0, 41, 42, 50, 121]
OPTIONS = {
    "plain": {},
    "batch, sinks, lse": {"batch": 2, "sinks": True, "dlse": True},
    "window, slopes": {"window": (9, 2), "dtype": torch.float32, "value_dim": 5, "alibi": "heads"},
    "prefix, softcap": {"prefix": (30, 0, 1, 5), "causal": False, "softcap": 3.0},
    "other keys": {"kv_layout": True, "dlse": True},
}


@pytest.fixture
def small(monkeypatch):
    """Rows for a group of heads that small cases have, also with short documents and windows."""
    monkeypatch.setattr(key_plan, "_ROWS_PER_GROUP", 4)
    monkeypatch.setattr(key_plan, "_ROWS_PER_SHORT_GROUP", 8)


@few_rows()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "usp"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_groups_of_heads_change_no_result(small, kind, strategy, options):
    ranks = 4 if strategy == "usp" else 3
    layout, options = getattr(Layout, kind)(CU, ranks), {"causal": True} | options
    if "kv_layout" in options:
        options["kv_layout"] = Layout.striped([0, 35, 36, 60, 200], ranks, stripe=3)
    case = Case(strategy, layout, **{"heads": 12, "kv_heads": 6} | options)
    for got in virtual(ranks, run, case):
        assert_right(got, oracle(case), case.dtype)


def messages(comm, case):
    """How many messages `traffic` counts for a rank in each pass; `test_scale.py` counts those
    sent."""
    attn = module(case.strategy, comm)
    q, k, v = (case.layout.shard(x, comm.rank) for x in case.inputs()[:3])
    counts = Counter[str]()
    for row in attn.traffic(q, k, v, case.layout, causal=case.causal):
        counts[row.direction] += row.messages
    return counts


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "usp"])
def test_gradients_of_a_group_are_rounded_once(small, monkeypatch, strategy):
    """They have the bits of sums that stay in fp32 until all groups are complete."""
    case = Case(strategy, Layout.zigzag(CU, 4), True, heads=12, kv_heads=6, dtype=torch.bfloat16)
    found, put = virtual(4, run, case), key_plan.HeadSlices.put

    def put_exactly(heads, total, gradients):
        gradients[:] = [x.float() for x in gradients]
        put(heads, total, gradients)

    monkeypatch.setattr(key_plan.HeadSlices, "put", put_exactly)
    for got, expected in zip(found, virtual(4, run, case), strict=True):
        assert all(map(np.array_equal, got, expected))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(12, 6), (12, 4), (32, 8), (6, 6), (24, 2)])
def test_groups_of_several_kv_heads_have_all_their_queries(q_heads, kv_heads):
    """Ring therefore rounds the gradients of such a group, which no other rank adds to."""
    size = q_heads // kv_heads
    for ranks, groups, whole in itertools.product(range(1, 9), range(1, 7), (False, True)):
        heads = HeadGroups(ranks, q_heads, kv_heads, groups, whole)
        for group in (x for rank in range(ranks) for x in heads.of_rank(rank)):
            if group.kv_count > 1:
                assert group.q == slice(group.kv.start * size, group.kv.stop * size)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 2), (4, 3)])
def test_each_group_of_heads_has_its_messages(small, strategy, kv_heads, groups):
    """A rank has 15 rows, and 4 make a group."""
    case = Case(strategy, Layout.contiguous(45, 3), causal=False, heads=8, kv_heads=kv_heads)
    for counts in virtual(3, messages, case):
        assert counts == {"forward": 2 * groups, "backward": 4 * groups}


def test_without_messages_all_heads_are_computed_together(small, monkeypatch):
    monkeypatch.setattr(key_plan.HeadSlices, "operands", None)
    case = Case("ring", Layout.contiguous([0, 40, 80, 120], 3), causal=True, heads=8, kv_heads=4)
    for got in virtual(3, run, case):
        assert_right(got, oracle(case), case.dtype)


@pytest.mark.parametrize(
    ("documents", "mask", "groups"),
    [
        ([0, 128], (UNLIMITED, 0), 4),
        ([0, 128], (UNLIMITED, UNLIMITED), 4),
        ([0, 64, 64, 128], (UNLIMITED, 0), 2),
        ([0, *range(8, 128, 16), 128], (UNLIMITED, 0), 1),
        ([0, 96, 128], (UNLIMITED, 0), 2),  # most work is in the long document
        ([0, 128], (31, 0), 1),
        ([0, 128], (32, 0), 2),
        ([0, 128], (32, 4), 2),
        ([0, 128], (32, UNLIMITED), 4),
        ([0, 128], (31, 0, (8,)), 4),  # all rows attend to a prefix
    ],
)
def test_groups_of_heads_follow_the_work(monkeypatch, documents, mask, groups):
    """Each of 8 ranks has 16 rows. 4 rows of a document on a rank make a group."""
    monkeypatch.setattr(key_plan, "_ROWS_PER_GROUP", 4)
    shape = OperandShape(torch.float32, 1, 16, 8, 8, 8)
    for kind in (Layout.contiguous, Layout.zigzag):
        geometry = kind(documents, 8).geometry
        assert len(key_plan.head_groups(shape, geometry, Mask(*mask))) == groups


def test_short_documents_have_one_group_of_heads():
    """32 documents of 4,096 tokens on 8 ranks; 256 of them have groups for the sake of memory."""
    shape = OperandShape(torch.bfloat16, 1, 32, 8, 128, 128)
    causal = Mask(UNLIMITED, 0)

    def groups(documents, length=4096):
        layout = Layout.zigzag([i * length for i in range(documents + 1)], 8)
        return len(key_plan.head_groups(shape, layout.geometry, causal))

    assert (groups(32), groups(1, 32 * 4096), groups(256), groups(64)) == (1, 4, 8, 2)
