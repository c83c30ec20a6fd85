"""The largest score of each head, against all scores of the packed batch written out."""

import pytest
import torch

from seqpar import Layout, Mask, use_backend
from seqpar.comm.messages.comm import Comm
from tests.support.cases import STRATEGIES, VARIANTS, Case, module, visible
from tests.support.ranks import virtual
from tests.support.tiers import every_third_pair

CU = [0, 13, 13, 40]
LAYOUT = Layout.zigzag(CU, 4)
RANGES = ((0, 0, 13, 0, 13, None, 0), (2, 3, 20, 5, 27, -3, 9))
CASES = {
    "causal": {"causal": True},
    "window, softcap": {"causal": True, "window": (4, 0), "softcap": 0.5, "scale": -0.7},
    "ranges, batch": {"causal": False, "ranges": RANGES, "batch": 2},
    "nothing": {"causal": False, "ranges": ()},
    "slopes": {"causal": True, "alibi": "heads"},
    "bf16": {"causal": True, "dtype": torch.bfloat16},
}


def expected(case):
    """(Hq,) in fp64."""
    q, k, *_ = (x if x is None else x.double() for x in case.inputs())
    seen = torch.from_numpy(visible(CU, CU, case.causal, case.window, case.prefix, case.ranges))
    scores = torch.einsum("...nhd,...mhd->...hnm", q, k.repeat_interleave(2, -2))
    scores = scores * (case.dim**-0.5 if case.scale is None else case.scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.amax((-2, -1)).reshape(-1, case.heads).amax(0)


def call(comm, case):
    """What a call returns with max logits, without, and with lse too; and its gradients."""
    attn, dim = module(case.strategy, comm), 0 if case.batch is None else 1
    q, k, v, *_ = case.inputs()
    own = [case.layout.shard(x, comm.rank, dim).requires_grad_() for x in (q, k, v)]
    with use_backend(case.backend):
        plain = attn(*own, case.layout, **case.options())
        out, largest = attn(*own, case.layout, return_max_logits=True, **case.options())
        many = attn(*own, case.layout, return_lse=True, return_max_logits=True, **case.options())
    assert torch.equal(out, plain) and torch.equal(many[0], out) and len(many) == 3
    assert torch.equal(many[2], largest) and not largest.requires_grad
    gradients = [torch.autograd.grad(x.square().sum(), own) for x in (plain, out)]
    assert all(map(torch.equal, *gradients))
    return largest


@pytest.mark.parametrize(
    ("strategy", "name"),
    every_third_pair([*STRATEGIES, *VARIANTS], list(CASES)),
)
def test_every_strategy_finds_the_global_largest_score(strategy, name):
    case = Case(strategy, LAYOUT, heads=4, kv_heads=2, **CASES[name])
    largest, *others = virtual(4, call, case)
    accumulator = torch.float64 if case.dtype == torch.float64 else torch.float32
    assert largest.dtype == accumulator and all(torch.equal(x, largest) for x in others)
    tolerance = {"rtol": 1e-12 if accumulator == torch.float64 else 1e-6, "atol": 0}
    torch.testing.assert_close(largest.double(), expected(case), **tolerance)


def in_two_parts(comm):
    attn = module("disaggregated", comm)
    q, k, v = (torch.randn(LAYOUT.tokens_on(comm.rank), 2, 8) for _ in "qkv")
    options = {"causal": True, "return_max_logits": True}
    one, other = (
        attn.finish(attn.begin(q, k, v, LAYOUT, **options)),
        attn(q, k, v, LAYOUT, **options),
    )
    return [torch.equal(x, y) for x, y in zip(one, other, strict=True)]


def test_calls_in_two_parts_find_it_too():
    assert virtual(4, in_two_parts) == [[True, True]] * 4


def test_meta_tensors_give_its_shape():
    q = torch.empty(LAYOUT.tokens_on(0), 4, 8, device="meta", dtype=torch.bfloat16)
    attn = module("ring", Comm("silent", 0, 4))
    out, largest = attn(q, q, q, LAYOUT, mask=Mask.of_ranges(RANGES), return_max_logits=True)
    assert out.shape == q.shape and largest.shape == (4,) and largest.dtype == torch.float32
