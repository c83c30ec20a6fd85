"""Functions of flash-attn's shape against an fp64 softmax, and what they refuse."""

import inspect

import pytest
import torch

from seqpar import Layout
from seqpar.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from tests.support.cases import module
from tests.support.ranks import virtual
from tests.unit.integrations.test_sdpa import by_documents, drawn

CU = [0, 5, 22, 30]


def compared(comm, varlen):
    """Differences of out, lse and gradients from those of the module and of one device."""
    layout = Layout.zigzag(CU if varlen else 30, 3)
    attn = module("all_gather", comm)
    batch = () if varlen else (2,)
    shapes = [(*batch, 30, heads, 8) for heads in (4, 2, 2)]
    whole = [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    parts = [layout.shard(x.detach(), attn.rank, -3).requires_grad_() for x in whole]
    call = {"causal": True, "softmax_scale": 0.3, "layout": layout, "return_attn_probs": True}
    if varlen:
        cu = torch.tensor(CU, dtype=torch.int32)
        options = call | {"group": comm, "strategy": "ring", "deterministic": True}
        out, lse, weights = flash_attn_varlen_func(*parts, cu, cu, 17, 17, **options)
    else:
        out, lse, weights = flash_attn_func(*parts, **call, strategy=attn)
    heads_first = (x.transpose(-3, -2) for x in whole)
    cu = CU if varlen else [0, 30]
    options = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    expected = by_documents(*heads_first, cu=cu, **options).transpose(-3, -2)
    _, expected_lse = attn(*parts, layout, causal=True, softmax_scale=0.3, return_lse=True)
    assert weights is None and lse.shape == (*batch, 4, layout.tokens_on(attn.rank))
    assert torch.allclose(lse, expected_lse.transpose(-2, -1), rtol=0, atol=1e-12)
    dout = drawn(*expected.shape, seed=9)
    expected.backward(dout)
    out.backward(layout.shard(dout, attn.rank, -3))
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(parts, whole, strict=True))]
    differences = [(x - layout.shard(y, attn.rank, -3)).detach() for x, y in pairs]
    return max(float(x.abs().max()) for x in differences)


@pytest.mark.parametrize("varlen", [False, True])
def test_equals_one_device(varlen):
    assert max(virtual(3, compared, varlen)) <= 1e-12


def test_windows_softcap_and_slopes_are_those_of_modules():
    layout = Layout.contiguous(CU, 2)

    def same(comm):
        q, k, v = (drawn(15, heads, 8) for heads in (4, 2, 2))
        attn = module("ring", comm)
        options = {"window_size": (3, 0), "softcap": 2.0, "sinks": drawn(4)}
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        got = flash_attn_varlen_func(q, k, v, layout=layout, strategy=attn, **options)
        return torch.equal(got, attn(q, k, v, layout, causal=False, **options))

    assert virtual(2, same) == [True, True]


def test_positional_arguments_are_flash_attns():
    """In the order of flash-attn 2.8, of which a model may pass them by position."""
    common = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"]
    common += ["deterministic", "return_attn_probs"]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    for function, expected in (
        (flash_attn_func, ["q", "k", "v", *common]),
        (flash_attn_varlen_func, ["q", "k", "v", *lengths, *common, "block_table"]),
    ):
        parameters = inspect.signature(function).parameters.values()
        names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        assert names == expected


Q = torch.zeros(15, 4, 8)
LAYOUT = Layout.contiguous(CU, 2)
INT32 = torch.tensor(CU, dtype=torch.int32)
REFUSALS = [
    ({"dropout_p": 0.1}, "dropout_p must be 0"),
    ({"alibi_slopes": torch.ones(2, 4)}, r"alibi_slopes must be \(4,\) or \(1, 4\)"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "alibi_slopes must not require"),
    ({"block_table": torch.zeros(1, 1)}, "block_table must be None"),
    ({"q": Q[None]}, r"q must be \(T, H, D\), got \(1, 15, 4, 8\)"),
    ({"q": 3}, "q must be a tensor"),
    ({"k": Q[:9]}, "k must have the 15 tokens"),
    ({"cu_seqlens_q": INT32[:-1]}, "cu_seqlens_q must be the layout's, of 3 documents"),
    ({"cu_seqlens_k": [0, 30]}, "cu_seqlens_k must be the layout's"),
    ({"cu_seqlens_k": "ab"}, "cu_seqlens_k must"),
    (
        {"max_seqlen_q": 16},
        "max_seqlen_q must be at least 17, the layout's longest document, got 16",
    ),
    ({"max_seqlen_k": None, "max_seqlen_q": 17.5}, "max_seqlen_q must be an integer"),
    ({"layout": 30}, "layout must be a seqpar.Layout"),
    ({"deterministic": None}, "deterministic must be True or False"),
    ({"causal": None}, "causal must be True or False"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[x[1] for x in REFUSALS])
def test_refusals_name_the_argument(changes, message):
    def refused(comm):
        call = {"q": Q, "k": Q, "v": Q, "layout": LAYOUT, "group": comm} | changes
        with pytest.raises(ValueError, match=message):
            flash_attn_varlen_func(**call)

    virtual(2, refused)


def test_a_dense_call_is_refused_by_name_too():
    def refused(comm):
        with pytest.raises(ValueError, match=r"q must be \(B, S, H, D\), got \(15, 4, 8\)"):
            flash_attn_func(Q, Q, Q, layout=LAYOUT, group=comm)
        loose = module("ring", comm, deterministic=False)
        with pytest.raises(ValueError, match="deterministic must be False with a module"):
            flash_attn_func(Q[None], Q, Q, deterministic=True, layout=LAYOUT, strategy=loose)

    virtual(2, refused)


def test_boundary_tensors_are_reread_after_writes():
    cu = INT32.clone()

    def read(comm):
        call = {"layout": LAYOUT, "group": comm}
        for _ in range(2):
            flash_attn_varlen_func(Q, Q, Q, cu, **call)

    virtual(2, read)
    cu[1] += 1
    with pytest.raises(ValueError, match="cu_seqlens_q must be the layout's"):
        virtual(2, read)
