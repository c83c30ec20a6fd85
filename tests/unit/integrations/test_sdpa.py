"""seqpar.sdpa against F.scaled_dot_product_attention of each document, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import seqpar
from seqpar import Layout
from tests.support.cases import STRATEGIES, module
from tests.support.fakes import fake_group
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

CU = [0, 5, 22, 30]


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def by_documents(q, k, v, cu=CU, **options):
    """SDPA of each document on one device; tokens are dim -2."""
    cuts = [x.split(torch.tensor(cu).diff().tolist(), -2) for x in (q, k, v)]
    parts = [F.scaled_dot_product_attention(*part, **options) for part in zip(*cuts, strict=True)]
    return torch.cat(parts, -2)


CALLS = {
    "causal": {"is_causal": True},
    "full, with a scale": {"scale": 0.3},
    "GQA": {"is_causal": True, "enable_gqa": True, "kv_heads": 2},
    "without a batch": {"is_causal": True, "batch": ()},
}


def compared(comm, strategy, layout, batch=(2,), kv_heads=4, **options):
    """The largest difference of out and of each gradient from one device's."""
    attn = module(strategy, comm)
    rank, worst = attn.rank, 0.0
    shapes = [(*batch, heads, layout.tokens, 8) for heads in (4, kv_heads, kv_heads)]
    whole = [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    parts = [layout.shard(x.detach(), rank, -2).requires_grad_() for x in whole]
    out = seqpar.sdpa(*parts, layout, strategy=attn, **options)
    expected = by_documents(*whole, **options)
    dout = drawn(*expected.shape, seed=9)
    expected.backward(dout)
    out.backward(layout.shard(dout, rank, -2))
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(parts, whole, strict=True))]
    for x, y in pairs:
        worst = max(worst, float((x - layout.shard(y, rank, -2)).detach().abs().max()))
    return worst


@pytest.mark.parametrize("call", CALLS)
def test_equals_sdpa_of_each_document(call):
    options = CALLS[call]
    results = virtual(3, lambda comm: compared(comm, "ring", Layout.zigzag(CU, 3), **options))
    assert max(results) <= 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_takes_it(strategy):
    layout, options = Layout.striped(CU, 2, stripe=3), CALLS["GQA"]
    assert max(virtual(2, lambda comm: compared(comm, strategy, layout, **options))) <= 1e-12


def test_it_says_lse_in_sdpas_order():
    layout = Layout.zigzag(CU, 2)

    def lse_of(comm):
        q, k, v = (layout.shard(drawn(2, 4, 30, 8, seed=i), comm.rank, 2) for i in range(3))
        attn = module("ring", comm)
        heads_last = (x.transpose(1, 2) for x in (q, k, v))
        _, expected = attn(*heads_last, layout, causal=False, return_lse=True)
        out, lse = seqpar.sdpa(q, k, v, layout, strategy=attn, return_lse=True)
        return out.shape == q.shape and torch.equal(lse, expected.transpose(1, 2))

    assert virtual(2, lse_of) == [True, True]


Q = torch.zeros(2, 4, 15, 8)  # (B, H, S, D) of a rank of two
LAYOUT = Layout.contiguous(CU, 2)
CHANGES = [
    ({"attn_mask": torch.ones(15, 15)}, "attn_mask must be None"),
    ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
    ({"is_causal": 1}, "is_causal must be True or False"),
    ({"query": Q.transpose(1, 2)}, r"query must be \(B, H, 15, D\) or .*got \(2, 15, 4, 8\)"),
    ({"key": Q[:, :, :9]}, r"key must be \(B, H, 15, D\)"),
    ({"value": [1.0]}, "value must be a tensor, got list"),
    ({"query": Q[0, 0]}, r"query must be \(B, H, 15, D\)"),
    ({"key": Q[:, :2], "value": Q[:, :2]}, "enable_gqa must be True for 4 heads of query and 2"),
    ({"axes": "bshd"}, 'axes must be "bhsd" or None'),
    ({"layout": 30}, "layout must be a seqpar.Layout, got int"),
    ({"layout": Layout.zigzag(30, 4)}, "layout must be for the group's 2 ranks, got one for 4"),
    ({"kv_layout": Layout.zigzag(9, 2)}, "key must be"),
    ({"group": None}, "group must be a process group"),
    ({"strategy": "rings"}, "strategy must be an attention module, or one of"),
    ({"strategy": None}, "strategy must be an attention module, or one of"),
    ({"softcap": -1.0}, "softcap must be"),
]


@pytest.mark.parametrize(("changes", "message"), CHANGES, ids=[x[1] for x in CHANGES])
@pytest.mark.parametrize("check_ranks", [False, True])
def test_refusals_name_the_argument(changes, message, check_ranks):
    """With `check_ranks` both ranks raise it, though the call of one of them is right."""

    def refused(comm):
        right = {"query": Q, "key": Q, "value": Q, "layout": LAYOUT, "group": comm}
        wrong = right | (changes if comm.rank == 0 or not check_ranks else {})
        if "group" not in changes and "strategy" not in changes:
            wrong |= {"group": None, "strategy": module("ring", comm, check_ranks=check_ranks)}
        elif check_ranks:
            return
        with pytest.raises(ValueError, match=message):
            seqpar.sdpa(**wrong)

    virtual(2, refused)


def test_lengths_that_sdpa_aligns_otherwise_are_refused():
    def refused(comm):
        keys = Layout.contiguous([0, 9, 22, 30], 2)
        with pytest.raises(ValueError, match="is_causal must be False where kv_layout has other"):
            seqpar.sdpa(Q, Q, Q, LAYOUT, comm, is_causal=True, kv_layout=keys)
        seqpar.sdpa(Q, Q, Q, LAYOUT, comm, is_causal=True, kv_layout=Layout.contiguous(CU, 2))
        with pytest.raises(ValueError, match="group must be left out"):
            seqpar.sdpa(Q, Q, Q, LAYOUT, comm, module("ring", comm))
        for name in ("window", "causal"):  # a module's name of is_causal, which would be ignored
            with pytest.raises(TypeError, match=f"argument '{name}'|^{name} is not an argument"):
                seqpar.sdpa(Q, Q, Q, LAYOUT, comm, **{name: True})

    virtual(2, refused)


@few_rows()
@pytest.mark.parametrize("heads", [7, 8])
@pytest.mark.parametrize("exchanged", [False, True])
def test_exchanged_axes_are_refused_on_all_ranks(heads, exchanged):
    """Also where a rank has as many tokens as there are heads, so that its shapes do not tell."""
    layout = Layout.contiguous(15, 2)  # 7 and 8 tokens

    def refused(comm):
        x = torch.ones(2, heads, layout.tokens_on(comm.rank), 4)
        x = x.transpose(1, 2).contiguous() if exchanged else x
        message = "query must be" if exchanged and x.shape[2] != x.shape[1] else 'axes must be "bhs'
        with pytest.raises(ValueError, match=message):
            seqpar.sdpa(x, x, x, layout, comm)
        if not exchanged:
            return seqpar.sdpa(x, x, x, layout, comm, axes="bhsd").shape == x.shape
        return True

    assert virtual(2, refused) == [True, True]


def test_grouped_heads_tell_the_axes():
    """One pair of tensors of which tokens and heads differ is enough."""
    layout = Layout.contiguous(16, 2)

    def accepted(comm):
        q, k = torch.ones(2, 8, 8, 4), torch.ones(2, 4, 8, 4)
        assert seqpar.sdpa(q, k, k, layout, comm, enable_gqa=True).shape == q.shape
        with pytest.raises(ValueError, match="key must be"):
            seqpar.sdpa(q, k.transpose(1, 2), k, layout, comm, enable_gqa=True)

    virtual(2, accepted)


def test_sharded_heads_are_taken_and_returned():
    with fake_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
        x = torch.ones(1, 2, 15, 8)  # two of four heads
        q = DTensor.from_local(x, mesh["tp"], [Shard(1)], run_check=False)
        out = seqpar.sdpa(q, q, q, LAYOUT, mesh["sp"])
        assert out.placements == (Shard(1),) and out.shape == (1, 4, 15, 8)
