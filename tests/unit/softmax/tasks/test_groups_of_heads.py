"""Disaggregated attention in place on ranks with many rows: in backward heads travel in groups."""

from collections import Counter

import pytest
import torch

from seqpar import Layout
from seqpar.strategies import disaggregated
from tests.support.cases import Case, assert_right, backward, begin, module, oracle, run
from tests.support.nccl import NcclComm, nccl
from tests.support.poison import poisoned
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

CU = [0, 41, 42, 50, 121]
OPTIONS = {
    "plain": {},
    "batch, sinks, lse": {"batch": 2, "sinks": True, "dlse": True},
    "window, slopes": {"window": (9, 2), "dtype": torch.float32, "value_dim": 5, "alibi": "heads"},
    "bf16": {"dtype": torch.bfloat16},
}
STRATEGIES = ["disaggregated+half to next", "disaggregated+at random+server"]


@pytest.fixture
def small(monkeypatch):
    """Rows for a group of heads that small cases have: three groups."""
    monkeypatch.setattr(disaggregated, "_ROWS_PER_GROUP", 10)


def case_of(strategy, options=None):
    options = {"heads": 12, "kv_heads": 6} | (options or {})
    return Case(strategy, Layout.zigzag(CU, 4), True, **options)


@few_rows()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_of_heads_change_no_result(small, strategy, options):
    case = case_of(strategy, options)
    for got in virtual(4, run, case):
        assert_right(got, oracle(case), case.dtype)


def in_two_parts(comm, case):
    """Return this rank's gradients of a call that is begun and finished."""
    q, k, v, _, dout, _ = (
        None if x is None else case.layout.shard(x, comm.rank) for x in case.inputs()
    )
    leaves, attn = [x.requires_grad_() for x in (q, k, v)], module(case.strategy, comm)
    out, _ = attn.finish(attn.begin(*leaves, case.layout, causal=case.causal, return_lse=True))
    return torch.autograd.grad(out, leaves, dout)


def at_once(comm, case):
    outputs, leaves = begin(comm, case)
    backward(outputs)
    return [x.grad for x in leaves.values()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_a_call_in_two_parts_has_the_same_bits_on_nccl(small, strategy, one_at_a_time):
    """It posts the messages of two groups before other work; neither order of posts blocks a rank.
    Foreign rows that are read are not overwritten by those of a later group."""
    case = case_of(strategy)
    expected = virtual(4, at_once, case)
    for function in (at_once, in_two_parts):
        with poisoned(NcclComm) as wrong:
            found, _ = nccl(4, function, case, one_at_a_time=one_at_a_time)
        assert not wrong
        for got, of_rank in zip(found, expected, strict=True):
            assert all(map(torch.equal, got, of_rank))


def counted(comm, case):
    """Return the messages and bytes of a call in each pass: sent ones, then those of `traffic`."""
    sent, found = comm.sent_messages, []
    outputs, _ = begin(comm, case)
    found.append(comm.sent_messages - sent)
    sent = comm.sent_messages
    backward(outputs)
    found.append(comm.sent_messages - sent)
    q, k, v = (case.layout.shard(x, comm.rank) for x in case.inputs()[:3])
    attn, stated = module(case.strategy, comm), Counter[str]()
    for row in attn.traffic(q, k, v, case.layout, causal=True):
        stated[row.direction] += row.messages if row.bytes else 0
    return found, [stated["forward"], stated["backward"]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_group_of_heads_has_its_messages_in_backward(monkeypatch, strategy):
    case = case_of(strategy)
    one = virtual(4, counted, case)
    monkeypatch.setattr(disaggregated, "_ROWS_PER_GROUP", 10)
    for (sent, stated), (single, _) in zip(virtual(4, counted, case), one, strict=True):
        assert sent == stated == [single[0], 3 * single[1]]
