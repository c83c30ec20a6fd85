"""Calls with a mask of ranges: right in every strategy and backend, and refused by name."""

import numpy as np
import pytest
import torch

import seqpar
from seqpar import Layout, Mask, make_attention, masks
from tests.support.cases import STRATEGIES, VARIANTS, Case, assert_right, oracle, run
from tests.support.mask_cases import disjoint_ranges
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

CU = [0, 23, 23, 60]
# Of two documents one is causal text with a bidirectional image, the other chunks and a first key
# that all see.
TEXT = ((0, 0, 23, 0, 23, None, 0), (0, 6, 15, 6, 15, 1, None))
CHUNKS = (
    *((2, 0, 12, 0, 12, None, 0), (2, 12, 24, 12, 24, None, 0), (2, 24, 37, 24, 37, None, 0)),
    (2, 12, 37, 0, 1, None, None),
)
LAYOUTS = {
    "zigzag": Layout.zigzag(CU, 4),
    "striped": Layout.striped(CU, 4, stripe=2),
    "contiguous": Layout.contiguous(CU, 4),
}


RANGES = {
    "text and chunks": (TEXT + CHUNKS, {}),
    "at random": (disjoint_ranges(1, CU), {"sinks": True, "batch": 2}),
    "others": (disjoint_ranges(2, CU), {"sinks": True, "batch": 1}),
}


@few_rows()
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *VARIANTS])
def test_every_strategy_and_backend_equals_the_oracle(strategy, layout, ranges, backend):
    heads, (listed, options) = {"heads": 4, "kv_heads": 2}, RANGES[ranges]
    settings = {"ranges": listed, "dlse": True, "backend": backend, **heads, **options}
    case = Case(strategy, LAYOUTS[layout], causal=False, **settings)
    expected = oracle(case)
    for got in virtual(4, run, case):
        assert_right(got, expected, case.dtype)


def call_of(comm, layout, options, heads=(4, 2)):
    """Out and gradients of a call of Ring, and what it sends, as one list."""
    attn = make_attention("ring", comm)
    generator = torch.Generator().manual_seed(comm.rank)
    q, k, v = (
        torch.randn(2, layout.tokens_on(comm.rank), n, 8, generator=generator, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    )
    out = attn(q, k, v, layout, **options)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))], attn.sent_bytes


@few_rows()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("options", "ranges"), [
    ({"causal": True}, masks.causal(CU)),
    ({"causal": False}, masks.full(CU)),
    ({"causal": True, "window_size": (6, 0)}, masks.causal(CU, 6)),
])  # fmt: skip
def test_equivalent_masks_have_equal_bits_and_bytes(layout, options, ranges):
    said = virtual(4, call_of, LAYOUTS[layout], options)
    listed = virtual(4, call_of, LAYOUTS[layout], {"mask": Mask.of_ranges(ranges)})
    for (one, sent), (other, sent_too) in zip(said, listed, strict=True):
        assert sent == sent_too and all(map(torch.equal, one, other))


def in_two_parts(comm, mask):
    attn = make_attention("disaggregated", comm)
    layout = LAYOUTS["striped"]
    q, k, v = (torch.randn(layout.tokens_on(comm.rank), 2, 8, requires_grad=True) for _ in "qkv")
    results = []
    for call in (lambda: attn.finish(attn.begin(q, k, v, layout, mask=mask)),
                 lambda: attn(q, k, v, layout, mask=mask),
                 lambda: seqpar.checkpoint(attn, q, k, v, layout, mask=mask)):  # fmt: skip
        out = call()
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    return results


def test_calls_in_two_parts_and_checkpoints_take_masks():
    for results in virtual(4, in_two_parts, Mask.of_ranges(TEXT + CHUNKS)):
        for others in results[1:]:
            assert all(map(torch.equal, results[0], others))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_empty_masks_and_documents_give_zeros(strategy):
    for ranges in ([], [(0, 2, 2, 0, 5, None, None)], [(1, 0, 0, 0, 0, None, None)]):
        case = Case(strategy, LAYOUTS["zigzag"], False, ranges=tuple(ranges), dlse=True)
        for out, lse, *gradients in virtual(4, run, case):
            assert not out.any() and (lse == -np.inf).all()
            assert not any(x.any() for x in gradients)
