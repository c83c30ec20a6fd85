"""The rank check: ranks whose calls disagree all raise the same error."""

import pytest
import torch
import torch.distributed as dist

from seqpar import Layout, Mask
from tests.support.calls import local
from tests.support.cases import STRATEGIES, module


def disagreeing(group, strategy, change):
    """A call in which rank 1 differs, after one in which all agree; the error, as all ranks should
    see it."""
    attn = module(strategy, group, check_ranks=True)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    layout = Layout.zigzag([0, 10, 24], ranks)
    options = {"heads": 4, "kv_heads": 2, "dtype": torch.float32}
    attn(*local(layout, rank, **options), layout, causal=True).sum().backward()
    call = {"layout": layout, "causal": True} | change.get("both", {})
    if rank == 1:
        options |= change.get("options", {})
        layout = change.get("layout", layout)
        call |= {"layout": layout} | change.get("call", {})
    q, k, v = local(layout, rank, **options)
    if rank == 1 and "cut" in change:
        q = q[1:]
    try:
        attn(q, k, v, **call)
    except ValueError as error:
        attn(
            *local(Layout.zigzag(12, ranks), rank), Layout.zigzag(12, ranks), causal=False
        )  # the group still works
        return str(error)
    return None


RANGES, OTHERS = (Mask.of_ranges([(0, 0, n, 0, 10, None, 0)]) for n in (9, 10))
DISAGREEMENTS = {
    "causal": (
        {"call": {"causal": False}},
        "causal must be the same on all ranks: rank 0 has True, rank 1 has False",
    ),
    "window": ({"call": {"window_size": (3, 0)}}, "window_size must be the same on all ranks"),
    "scale": ({"call": {"softmax_scale": 0.1}}, "softmax_scale must be the same on all ranks"),
    "softcap": ({"call": {"softcap": 3.0}}, "softcap must be the same on all ranks"),
    "prefix": ({"call": {"prefix_lens": [1, 2]}}, "prefix_lens must be the same on all ranks"),
    "mask": ({"call": {"causal": False, "mask": RANGES}}, "causal must be the same on all ranks"),
    "ranges": (
        {"call": {"mask": OTHERS}, "both": {"causal": False, "mask": RANGES}},
        r"mask must be the same on all ranks: rank 0 has the range \(0, 0, 9, 0, 9, None, 0\), "
        r"rank 1 has the range \(0, 0, 10, 0, 10, None, 0\), rank 2 has",
    ),
    "return_lse": ({"call": {"return_lse": True}}, "return_lse must be the same on all ranks"),
    "return_max_logits": (
        {"call": {"return_max_logits": True}},
        "return_max_logits must be the same on all ranks",
    ),
    "dtype": ({"options": {"dtype": torch.bfloat16}}, "dtype must be the same on all ranks"),
    "heads": ({"options": {"heads": 2}}, "heads of q must be the same on all ranks"),
    "layout": (
        {"layout": Layout.zigzag([0, 12, 24], 3)},
        "layout must be the same on all ranks: rank 0 has 2 documents of 10, 14 tokens, .*, "
        "rank 1 has 2 documents of 12, 12 tokens, .*sampler",
    ),
    "cut": (
        {"layout": Layout.contiguous([0, 10, 24], 3)},
        r"rank 0 has spans \(document, start, stop\) \(0, 0, 1\), .* on rank 0, .*"
        r"rank 1 has spans \(document, start, stop\) \(0, 0, 8\) on rank 0, ",
    ),
    "one rank's tensor": (
        {"cut": True},
        "q must have the 8 tokens its layout gives this rank, got 7 in .* \\(rank 1 of 3\\)",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise_the_same_error(pool, name):
    import re

    change, message = DISAGREEMENTS[name]
    errors = pool(3, disagreeing, "ring", change)
    assert len(set(errors)) == 1 and re.search(message, errors[0]), errors


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_every_strategy_checks_ranks(pool, strategy):
    errors = pool(3, disagreeing, strategy, DISAGREEMENTS["causal"][0])
    assert len(set(errors)) == 1 and "causal must be the same" in errors[0]
