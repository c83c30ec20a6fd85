"""deterministic="ranks": the same bits on any number of ranks, in any layout, by any strategy."""

import copy
import dataclasses

import pytest
import torch

from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.softmax.keys import rank_invariant_plan
from tests.support.cases import Case, assert_right, backward, begin, module, oracle, run
from tests.support.ranks import virtual
from tests.support.same_bits import (
    RANKS,
    STRATEGIES,
    bits,
    default_threads,
    drawn_cases,
    threaded_cases,
    torch_threads,
)
from tests.support.tiers import exhaustive_seeds, few_rows


@pytest.mark.parametrize("seed", exhaustive_seeds(5, 12))
def test_random_calls_have_equal_bits_on_any_ranks(seed, monkeypatch):
    monkeypatch.setattr(rank_invariant_plan, "TILE", 16)
    one, others = drawn_cases(seed)
    expected = virtual(1, bits, one)[0]
    for case in others:
        found = virtual(case.layout.ranks, bits, case)
        assert all(x == expected for x in found), case


@pytest.mark.parametrize("seed", exhaustive_seeds(5, 12))
def test_threads_and_ranks_do_not_change_bits(seed, monkeypatch):
    monkeypatch.setattr(rank_invariant_plan, "TILE", 64)
    one, others = threaded_cases(seed)
    expected = virtual(1, bits, one)[0]
    for number, case in enumerate([one, *others]):
        for threads in (1, 2, 3) if seed % 5 == number else (1 + (seed + number) % 3,):
            with torch_threads(threads):
                found = virtual(case.layout.ranks, bits, case)
            assert all(x == expected for x in found), (case, threads)


@few_rows()
@pytest.mark.parametrize("strategy", ["ulysses", "usp"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_tile_of_one_query_has_equal_bits(strategy, softcap):
    """With 1,025 tokens the second tile has one query, and a rank of Ulysses has one head."""
    options = {"causal": True, "heads": 2, "kv_heads": 2, "dim": 64, "value_dim": 64}
    options |= {"softcap": softcap, "dtype": torch.float32, **RANKS}
    expected = virtual(1, bits, Case("ring", Layout.contiguous(1025, 1), **options))[0]
    for threads in (2, 3):
        with torch_threads(threads):
            found = virtual(2, bits, Case(strategy, Layout.zigzag(1025, 2), **options))
        assert all(x == expected for x in found)


def test_other_threads_keep_their_number_of_torch_threads():
    with torch_threads(5):
        case = Case("ring", Layout.contiguous(8, 1), causal=True, **RANKS)
        virtual(1, bits, case)
        assert torch.get_num_threads() == default_threads() == 5


@pytest.mark.parametrize("seed", range(300, 303))
def test_random_calls_are_right_with_the_documented_traffic(seed, monkeypatch):
    monkeypatch.setattr(rank_invariant_plan, "TILE", 16)
    for case in drawn_cases(seed)[1]:
        assert_right(virtual(case.layout.ranks, run, case)[0], oracle(case), case.dtype)
        for sent, said in virtual(case.layout.ranks, sent_and_said, case):
            assert sent == said


def sent_and_said(comm, case):
    """What this rank sends, and what `traffic` says: {(pass, peer): [messages, bytes]}."""
    comm = copy.copy(comm)
    sent, said, post = {}, {}, comm.start

    def add(totals, direction, peer, messages, size):
        total = totals.setdefault((direction, peer), [0, 0])
        total[0] += messages
        total[1] += size

    def start(sends, recvs, exchange):
        for peer, x in sends:
            add(sent, "forward" if "forward" in exchange.label else "backward", peer, 1, x.nbytes)
        return post(sends, recvs, exchange)

    comm.start = start
    outputs, leaves = begin(comm, case)
    backward(outputs)
    attn = module(case.strategy, comm, **dict(case.module_options))
    operands = [leaves[name] for name in "qkv"]
    for row in attn.traffic(
        *operands, case.layout, return_lse=True, sinks=leaves.get("sinks"), **case.options()
    ):
        add(said, *row[:1], *row[2:])
    return sent, said


@pytest.mark.parametrize("ranks", [1, 2])
def test_full_size_tiles_have_equal_bits(ranks):
    """1,100 tokens are two tiles, which a contiguous layout cuts and a zigzag one cuts twice."""
    shape = {"causal": True, "heads": 2, "kv_heads": 1, "dtype": torch.float32, **RANKS}
    expected = virtual(1, bits, Case("ring", Layout.contiguous([0, 1100, 1150], 1), **shape))[0]
    for make in (Layout.contiguous, Layout.zigzag):
        case = Case("all_gather", make([0, 1100, 1150], ranks), **shape)
        assert virtual(ranks, bits, case) == ranks * [expected]


def test_bits_differ_without_it(monkeypatch):
    """Else the tests above prove nothing."""
    one, others = drawn_cases(5)
    expected = virtual(1, bits, dataclasses.replace(one, module_options=()))[0]
    found = [dataclasses.replace(case, module_options=()) for case in others]
    assert any(virtual(x.layout.ranks, bits, x)[0] != expected for x in found)


def test_zeros_have_one_sign(monkeypatch):
    """Contributions of −0 count as those of 0, which keys that no query of a tile sees have."""
    monkeypatch.setattr(rank_invariant_plan, "TILE", 4)

    def gradients(comm, layout):
        q, k, v = (torch.zeros(layout.tokens_on(comm.rank), 1, 8) for _ in range(3))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        attn = module("ring", comm, deterministic="ranks")
        attn(*leaves, layout, causal=True).backward(torch.full_like(q, -0.0))
        found = [layout.unshard(x.grad, comm) for x in leaves]
        return [x.view(torch.int32) for x in found]

    expected = virtual(1, gradients, Layout.contiguous(12, 1))[0]
    for rank in virtual(3, gradients, Layout.contiguous(12, 3)):
        assert all(torch.equal(x, y) for x, y in zip(rank, expected, strict=True))


def test_all_ranks_hold_tiles_of_stripes(monkeypatch):
    """Where all tiles are cut, they are given out evenly."""
    monkeypatch.setattr(rank_invariant_plan, "TILE", 16)
    layout = Layout.striped(512, 4, stripe=4)

    def areas(comm):
        x = torch.zeros(layout.tokens_on(comm.rank), 1, 8)
        attn = module("ring", comm, deterministic="ranks")
        return attn.mask_area(x, x, x, layout, causal=True)

    area = virtual(4, areas)[0]
    assert area.sum() == 512 * 513 // 2 and area.max() < 1.05 * area.mean()


REFUSED = {
    "token_ring": {},
    "disaggregated": {},
    "usp": {"outer": "token_ring"},
    "ulysses": {"keep": "tokens"},
}


@pytest.mark.parametrize("strategy", REFUSED)
def test_unsupported_strategies_are_refused_at_construction(strategy):
    text = "^deterministic must be .*, which ring, all_gather, ulysses and usp take$"
    if REFUSED[strategy].get("keep"):
        text = "^keep must be"
    with pytest.raises(ValueError, match=text):
        module(strategy, Comm("silent", 0, 2), deterministic="ranks", **REFUSED[strategy])


@pytest.mark.parametrize("value", ["rank", 1, None, "True"])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"^deterministic must be True, False or"):
        module("ring", Comm("silent", 0, 2), deterministic=value)


def test_ranks_that_differ_in_it_all_raise():
    def call(comm):
        layout, x = Layout.contiguous(8, 2), torch.zeros(4, 1, 8)
        options = {"deterministic": "ranks" if comm.rank else True, "check_ranks": True}
        with pytest.raises(ValueError, match=r"^strategy must"):
            module("ring", comm, **options)(x, x, x, layout, causal=True)

    virtual(2, call)


def test_max_logits_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(rank_invariant_plan, "TILE", 16)

    def largest(comm, strategy, layout):
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(90, 4, 8, generator=generator) for _ in range(2))
        q, k = (layout.shard(x, comm.rank) for x in (q, k))
        attn = module(strategy, comm, deterministic="ranks")
        return attn(q, k, k, layout, causal=True, return_max_logits=True)[1]

    expected = virtual(1, largest, "ring", Layout.contiguous(90, 1))[0]
    for strategy in STRATEGIES:
        for found in virtual(4, largest, strategy, Layout.zigzag(90, 4)):
            assert torch.equal(found, expected)
