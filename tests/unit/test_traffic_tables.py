"""`traffic`, from geometry alone, against what calls really send: messages, bytes, steps, peers."""

import itertools
from collections import Counter

import pytest
import torch

from seqpar import LASP2Attention, Layout, Mask
from seqpar.balance import RowBytes
from seqpar.core.traffic import Traffic, summed
from seqpar.strategies.registry import SOFTMAX
from tests.support.cases import module
from tests.support.mask_cases import disjoint_ranges
from tests.support.plans import AtRandom, at_keys, to_next
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

MORE = ["usp+token_ring", "usp+mesh", "disaggregated+at random", "disaggregated+at random+server"]
DOCUMENTS = [0, 37, 38, 38, 120]
LAYOUTS = {
    "contiguous": Layout.contiguous(DOCUMENTS, 4),
    "zigzag": Layout.zigzag(DOCUMENTS, 4),
    "striped": Layout.striped(DOCUMENTS, 4, 3),
    "uneven": Layout.from_spans(
        [[(0, 0, 37)], [(3, 0, 9), (3, 60, 82)], [], [(1, 0, 1), (3, 9, 60)]], DOCUMENTS
    ),
}
CALLS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window_size": (20, 0)},
    "prefix": {"causal": True, "prefix_lens": [30, 0, 0, 5], "window_size": (9, 0)},
    "ranges": {"mask": Mask.of_ranges(disjoint_ranges(3, DOCUMENTS, tries=20))},
    "lse": {"causal": True, "return_lse": True},
    "max logits": {"causal": True, "return_max_logits": True},
    "cross": {"causal": True, "kv_layout": Layout.striped([0, 64, 70, 75, 90], 4, 2)},
}


def recorded(comm, direction):
    """Record in a counter all that a rank sends: (direction, step, peer) -> messages, bytes."""
    found, exchange = {}, comm.exchange

    def recording(sends, recvs, *, label, step=0):
        sends = list(sends)
        for peer, tensor in sends:
            if tensor.nbytes:
                row = found.setdefault((direction[0], step, peer), Counter())
                row.update(messages=1, bytes=tensor.nbytes)
        return exchange(sends, recvs, label=label, step=step)

    comm.exchange = recording
    return found


def as_rows(found):
    return {Traffic(*key, **total) for key, total in found.items()}


def call(comm, strategy, options, layout, heads, dtype):
    attn, rank = module(strategy, comm, **options.get("module", {})), comm.rank
    options = {name: value for name, value in options.items() if name != "module"}
    kv_layout = options.get("kv_layout", layout)
    q = torch.randn(2, layout.tokens_on(rank), heads[0], 8, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(2, kv_layout.tokens_on(rank), heads[1], dim, dtype=dtype, requires_grad=True)
        for dim in (8, 5)
    )
    direction = ["forward"]
    found = recorded(attn._bound.comm, direction)
    before = attn.sent_bytes
    expected = attn.traffic(q, k, v, layout, **options)
    assert attn.sent_bytes == before
    result = attn(q, k, v, layout, **options)
    outputs = result if isinstance(result, tuple) else (result,)
    direction[0] = "backward"
    sum(x.nan_to_num(neginf=0.0).sum() for x in outputs).backward()
    return set(expected), as_rows(found), expected


@few_rows()
@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", [*SOFTMAX, *MORE])
def test_softmax_traffic_is_what_is_sent(strategy, layout, options):
    arguments = CALLS[options], LAYOUTS[layout], (6, 3), torch.float32
    for expected, found, _ in virtual(4, call, strategy, *arguments):
        assert expected == found


@few_rows()
@pytest.mark.parametrize(("strategy", "options"), [
    ("token_ring", {"module": {"partial_dtype": torch.bfloat16}}),
    ("mesh", {"module": {"partial_dtype": torch.float16}, "return_lse": True}),
    ("ulysses", {"module": {"head_groups": 1}}),
    ("usp", {"module": {"head_groups": 3}}),
    ("ulysses", {"module": {"keep": "tokens"}, "return_lse": True}),
    ("usp", {"module": {"keep": "tokens"}}),
    ("disaggregated", {"module": {"plan": AtRandom(0), "backward_plan": at_keys}}),
])  # fmt: skip
@pytest.mark.parametrize("heads", [(6, 3), (4, 1), (3, 3)])
def test_options_and_heads_count_too(strategy, options, heads):
    arguments = options | {"causal": True}, LAYOUTS["zigzag"], heads, torch.bfloat16
    for expected, found, _ in virtual(4, call, strategy, *arguments):
        assert expected == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_planner_knows_the_bytes_of_a_row(dtype):
    """Where all is computed on the next of two ranks, all rows travel."""
    layout, plan = Layout.contiguous(40, 2), {"module": {"plan": to_next}, "causal": False}
    sums = []  # with 2 and with 4 heads of keys, forward and backward
    for heads in ((4, 2), (4, 4)):
        rows = [row for *_, rows in virtual(2, call, "disaggregated", plan, layout, heads, dtype)
                for row in rows]  # fmt: skip
        passes = "forward", "backward"
        sums.append([sum(x.bytes for x in rows if x.direction == y) / 80 for y in passes])
    keys = [more - few for few, more in zip(*sums, strict=True)]  # of 2 heads
    queries = [few - key for few, key in zip(sums[0], keys, strict=True)]
    sizes = {"value_dim": 5, "itemsize": dtype.itemsize}
    equal = RowBytes.sent(4, 2, 8, **sizes, backward=1.0)
    assert equal == (max(queries), max(keys))
    assert RowBytes.sent(4, 2, 8, **sizes, backward=1e9).query == pytest.approx(5e8 * queries[0])


def linear_call(comm, transport, options, layout):
    lin = LASP2Attention(comm, transport=transport, blocks=3)
    shape = 2, layout.tokens_on(comm.rank)
    q, k, v = (torch.randn(*shape, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    direction = ["forward"]
    found = recorded(comm, direction)
    expected = lin.traffic(q, k, v, layout, **options)
    result = lin(q, k, v, layout, **options)
    outputs = result if isinstance(result, tuple) else (result,)
    direction[0] = "backward"
    sum(x.sum() for x in outputs).backward()
    return set(expected), as_rows(found)


@few_rows()
@pytest.mark.parametrize("options", [
    {}, {"causal": False}, {"return_state": True}, {"causal": False, "return_state": True},
])  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", ["all_gather", "scan"])
def test_linear_traffic_is_what_is_sent(transport, layout, options):
    if layout == "striped" and options.get("causal", True):
        pytest.skip("stripes so short are refused")
    for expected, found in virtual(4, linear_call, transport, options, LAYOUTS[layout]):
        assert expected == found


def test_rows_are_added_up_and_in_order():
    rows = [
        Traffic("backward", 0, 1, 1, 8),
        Traffic("forward", 2, 0, 1, 4),
        Traffic("forward", 1, 3, 2, 6),
        Traffic("forward", 2, 0, 1, 4),
        Traffic("forward", 3, 0, 1, 0),
    ]
    assert summed(rows) == [
        Traffic("forward", 1, 3, 2, 6),
        Traffic("forward", 2, 0, 2, 8),
        Traffic("backward", 0, 1, 1, 8),
    ]


def test_any_rank_may_be_asked_about():
    def ask(comm):
        layout = LAYOUTS["zigzag"]
        x = torch.zeros(layout.tokens_on(comm.rank), 4, 8)
        attn = module("ring", comm)
        return [attn.traffic(x, x, x, layout, rank=rank, causal=True) for rank in range(4)]

    answers = virtual(4, ask)
    assert all(answer == answers[0] for answer in answers)
    sent = [row.bytes for row in itertools.chain(*answers[0])]
    assert len(sent) > 0 and min(sent) > 0


def test_a_rank_outside_the_group_is_refused():
    def ask(comm):
        layout = LAYOUTS["zigzag"]
        x = torch.zeros(layout.tokens_on(comm.rank), 4, 8)
        for rank, message in (
            (4, "below the group's 4 ranks"),
            (-1, "at least 0"),
            (0.5, "integer"),
        ):
            with pytest.raises(ValueError, match=f"rank must be .*{message}"):
                module("ring", comm).traffic(x, x, x, layout, rank=rank, causal=True)

    virtual(4, ask)
