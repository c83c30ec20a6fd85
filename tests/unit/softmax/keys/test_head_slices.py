"""Ring and AllGather on ranks with many rows: heads travel in groups, each with its messages."""

from collections import Counter

import pytest
import torch

from seqpar import Layout
from seqpar.attention.operands import OperandShape
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
    """Rows for a group of heads that small cases have."""
    monkeypatch.setattr(key_plan, "_ROWS_PER_GROUP", 4)


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
    ("documents", "shared", "groups"),
    [(128, 16, 4), ([0, *range(8, 128, 16), 128], 2, 1), ([0, 64, 64, 128], 6, 1)],
)
def test_documents_on_few_ranks_need_fewer_groups(small, documents, shared, groups):
    """Each of 8 ranks has 16 rows, of documents on all ranks, on 2 and on 4."""
    geometry = Layout.contiguous(documents, 8).geometry
    assert (geometry.most_tokens, geometry.shared_tokens) == (16, shared)
    shape = OperandShape(torch.float32, 1, 16, 8, 8, 8)
    assert len(key_plan.head_groups(shape, geometry)) == groups
