"""Decode: queries that all ranks have, over keys that stay where they are, against the oracle."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from seqpar import Layout, Mask, make_attention
from tests.support.cases import STRATEGIES, Case, assert_right, module, oracle
from tests.support.mask_cases import disjoint_ranges
from tests.support.ranks import virtual
from tests.support.same_bits import RANKS
from tests.support.tiers import few_rows

QUERIES, KEYS = [0, 2, 3, 6], [0, 9, 20, 41]  # speculative blocks of three sequences
ONE, SPREAD = Layout.contiguous(QUERIES, 1), Layout.striped(KEYS, 3, stripe=2)
EMPTY = Layout.from_spans([[], [(0, 0, 9), (1, 0, 11)], [(2, 0, 21)]], KEYS)


def decoded(comm, case, cu_seqlens=QUERIES, kind="ring"):
    """What `decode` returns on this rank, and the bytes that it sends."""
    q, k, v, sinks, *_ = case.inputs()
    attn = module(kind, comm, **dict(case.module_options))
    dim = 0 if case.batch is None else 1
    k, v = (case.kv_layout.shard(x, attn.rank, dim) for x in (k, v))
    before, options = attn.sent_bytes, case.options() | {"sinks": sinks, "return_lse": True}
    out, lse = attn.decode(q, k, v, cu_seqlens=cu_seqlens, **options)
    return out, lse, attn.sent_bytes - before


CASE = Case("ring", ONE, True, kv_layout=SPREAD, heads=4, kv_heads=2, value_dim=6)
CASES = {
    "GQA": CASE,
    "not causal": dataclasses.replace(CASE, causal=False, window=(3, 2)),
    "window": dataclasses.replace(CASE, window=(5, 0)),
    "window of the last stripe": dataclasses.replace(CASE, window=(0, 0)),
    "prefix": dataclasses.replace(CASE, window=(2, 0), prefix=(1, 0, 4)),
    "sinks and softcap": dataclasses.replace(CASE, sinks=True, softcap=1.5, scale=0.3),
    "batch": dataclasses.replace(CASE, batch=2, kv_heads=4, sinks=True),
    "ranks without keys of a document": dataclasses.replace(CASE, kv_layout=EMPTY),
    "fp32": dataclasses.replace(CASE, dtype=torch.float32),
    "bf16": dataclasses.replace(CASE, dtype=torch.bfloat16),
    "ranges": dataclasses.replace(CASE, ranges=disjoint_ranges(4, QUERIES, KEYS, tries=20)),
    "slopes": dataclasses.replace(CASE, alibi="heads", sinks=True),
    "slopes of batch entries": dataclasses.replace(CASE, alibi="batch", batch=2, causal=False),
    "reference": dataclasses.replace(CASE, backend="reference", window=(4, 0)),
    "same bits": dataclasses.replace(CASE, window=(5, 0), sinks=True, **RANKS),
    "same bits, batch": dataclasses.replace(CASE, batch=2, dtype=torch.bfloat16, **RANKS),
}


@pytest.mark.parametrize("name", CASES)
def test_decoding_equals_one_device_on_all_ranks(name):
    case = CASES[name]
    expected = oracle(case)
    results = virtual(3, decoded, case)
    out, lse, _ = results[0]
    for other_out, other_lse, _ in results[1:]:
        assert torch.equal(out, other_out) and torch.equal(lse, other_lse)
    assert out.dtype == case.dtype
    assert_right([x.double().numpy() for x in (out, lse)], expected[:2], case.dtype)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_bits_are_equal_on_any_number_of_ranks(strategy):
    case = dataclasses.replace(CASE, dtype=torch.float32, batch=2, **RANKS)
    alone = dataclasses.replace(case, kv_layout=Layout.contiguous(KEYS, 1))
    expected = virtual(1, decoded, alone, QUERIES, "ring")[0][:2]
    for found in virtual(3, decoded, case, QUERIES, strategy):
        assert all(map(torch.equal, found[:2], expected))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_do_not_differ(strategy):
    keys = Layout.contiguous(KEYS, 4)
    case = dataclasses.replace(CASE, kv_layout=keys)
    results = virtual(4, decoded, case, QUERIES, strategy)
    expected = virtual(4, decoded, case)
    for got, ring in zip(results, expected, strict=True):
        assert torch.equal(got[0], ring[0]) and got[2] == ring[2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_do_not_depend_on_the_context(dtype):
    """B·T·Hq·(Dv + 1) elements of 4 bytes, or 8, to each other rank, as the docstring says."""
    for length in (9, 41, 4000):
        keys = Layout.zigzag(length, 4)
        case = Case("ring", Layout.contiguous(3, 1), True, kv_layout=keys, batch=2, dtype=dtype)
        case = dataclasses.replace(case, heads=6, kv_heads=3, value_dim=5)
        element = 8 if dtype == torch.float64 else 4
        for _, _, sent in virtual(4, decoded, case, None):
            assert sent == 3 * 2 * 3 * 6 * (5 + 1) * element


def test_a_mask_of_ranges_is_taken():
    """The last queries see the first keys of their document, and none of the others."""
    mask = Mask.of_ranges([(2, 0, 3, 0, 8, None, None), (0, 0, 2, 4, 9, None, None)])

    def on_rank(comm):
        q, k, v, *_ = CASE.inputs()
        k, v = (SPREAD.shard(x, comm.rank) for x in (k, v))
        attn = make_attention("ring", comm)
        return attn.decode(q, k, v, SPREAD, cu_seqlens=QUERIES, mask=mask)

    q, k, v, *_ = CASE.inputs()
    for out in virtual(3, on_rank):
        assert not out[2].any()  # of document 1, in no range
        for rows, keys in ((slice(2), slice(4, 9)), (slice(3, 6), slice(20, 28))):
            part = (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))
            right = F.scaled_dot_product_attention(*part, enable_gqa=True).transpose(0, 1)
            assert torch.allclose(out[rows], right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["aten", "triton"])  # whose interpreter runs in one thread
def test_one_rank_sends_nothing(backend):
    case = dataclasses.replace(CASE, kv_layout=Layout.zigzag(KEYS, 1), window=(4, 0))
    case = dataclasses.replace(case, backend=backend, dtype=torch.float32, dim=16, value_dim=16)
    ((out, lse, sent),) = virtual(1, decoded, case)
    assert_right([x.double().numpy() for x in (out, lse)], oracle(case)[:2], case.dtype)
    assert sent == 0


def test_documents_without_keys_or_queries_are_empty_rows():
    keys, queries = Layout.zigzag([0, 0, 5, 5], 2), [0, 0, 2, 2]

    def on_rank(comm):
        k = torch.ones(keys.tokens_on(comm.rank), 1, 4)
        return make_attention("ring", comm).decode(
            torch.ones(2, 2, 4), k, k, keys, cu_seqlens=queries
        )

    for out in virtual(2, on_rank):
        assert torch.allclose(out, torch.ones(2, 2, 4))


Q, K = torch.zeros(6, 4, 8), torch.zeros(13, 2, 8)
EVEN = Layout.contiguous([0, 9, 20, 39], 3)  # 13 keys on each rank
REFUSALS = [
    ({"q": [1.0]}, "q must be a tensor"),
    ({"q": Q[:4]}, r"q must have the same number of tokens in each of kv_layout's 3 documents"),
    ({"q": Q[0]}, "q must be"),
    ({"k_cache": K[:9]}, "k_cache must have the 13 tokens that kv_layout gives this rank"),
    ({"v_cache": K[:9]}, "v_cache must have the 13 tokens"),
    ({"v_cache": K.double()}, "v_cache must be of q's dtype"),
    ({"kv_layout": 39}, "kv_layout must be a seqpar.Layout"),
    ({"kv_layout": Layout.zigzag(26, 2)}, "kv_layout must be for the group's 3 ranks"),
    ({"cu_seqlens": [0, 6]}, "cu_seqlens must have one entry more than kv_layout's 3 documents"),
    ({"cu_seqlens": [0, 6, 3, 6]}, "cu_seqlens must not decrease"),
    ({"cu_seqlens": [0, 2, 4, 5]}, "q must have the 5 tokens"),
    (
        {"q": torch.zeros(30, 4, 8)},
        "kv_layout must have at least the 10 tokens that q has in docum",
    ),
    ({"k_cache": K.clone().requires_grad_()}, "k_cache must require no gradient"),
    ({"sinks": torch.zeros(4, requires_grad=True)}, "sinks must require no gradient"),
    ({"sinks": torch.zeros(3)}, "sinks must be"),
    ({"softcap": -1.0}, "softcap must be"),
    ({"causal": 1}, "causal must be True or False"),
    ({"return_max_logits": True}, "return_max_logits must be False: decode"),
]


@few_rows(pairs=False)
@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[x[1] for x in REFUSALS])
@pytest.mark.parametrize("check_ranks", [False, True])
def test_refusals_name_the_argument(changes, message, check_ranks):
    """With `check_ranks` all ranks raise it, though the calls of the others are right."""

    def refused(comm):
        attn = module("ring", comm, check_ranks=check_ranks)
        call = {"q": Q, "k_cache": K, "v_cache": K, "kv_layout": EVEN}
        wrong = changes if comm.rank == 0 or not check_ranks else {}
        with pytest.raises(ValueError, match=message):
            attn.decode(**call | wrong)

    virtual(3, refused)


@pytest.mark.parametrize("cu_seqlens", [[0, 2, 4, 5], [0, 2, 4, 7]])
@pytest.mark.parametrize("deterministic", [True, "ranks"])
def test_each_query_needs_a_document(cu_seqlens, deterministic):
    def refused(comm):
        attn = module("ring", comm, deterministic=deterministic)
        with pytest.raises(ValueError, match=f"q must have the {cu_seqlens[-1]} tokens of cu_seq"):
            attn.decode(Q, K, K, EVEN, cu_seqlens=cu_seqlens)

    virtual(3, refused)


def test_ranks_with_other_queries_are_told():
    def refused(comm):
        attn = module("ring", comm, check_ranks=True)
        cu_seqlens = [0, 2, 4, 6] if comm.rank else [0, 1, 4, 6]
        with pytest.raises(ValueError, match="cu_seqlens must be the same on all ranks"):
            attn.decode(Q, K, K, EVEN, cu_seqlens=cu_seqlens)

    virtual(3, refused)


def test_gradients_are_not_refused_where_none_are_recorded():
    def on_rank(comm):
        with torch.no_grad():
            return module("ring", comm).decode(Q.clone().requires_grad_(), K, K, EVEN)

    assert all(out.shape == Q.shape for out in virtual(3, on_rank))
