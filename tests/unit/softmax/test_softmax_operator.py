"""The operator around the arithmetic: opcheck, autograd, autocast, and what backward keeps."""

import gc
import weakref

import pytest
import torch

from seqpar import Layout, make_attention, use_backend
from seqpar.comm.messages.comm import Comm
from seqpar.softmax.softmax_operator import ATTENTION
from tests.support.calls import local
from tests.support.cases import STRATEGIES, module
from tests.support.ranks import virtual
from tests.support.tiers import few_rows


@few_rows(pairs=False)
@pytest.mark.parametrize("max_logits", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operators_pass_opcheck(strategy, max_logits):
    """torch's own checks of schema, fake tensors and autograd registration, on one rank.

    In the main thread: torch 2.11 keeps, for fake tensors on a machine without a GPU, a pointer to
    an object of the thread that used one first, and crashes after that thread has ended.
    """
    attn = module(strategy, Comm("alone", 0, 1))
    layout = Layout.zigzag([0, 5, 12], 1)
    q, k, v = (x[None].detach().requires_grad_() for x in local(layout, 0, heads=4, kv_heads=2))
    options = {"causal": True, "return_lse": True, "alibi_slopes": torch.rand(4)}
    options["return_max_logits"] = max_logits
    tensors, arguments, _ = attn._operator_inputs(q, k, v, layout, **options)
    carried = ATTENTION.arguments.flat(arguments)
    torch.library.opcheck(torch.ops.seqpar.attention, (*tensors, *carried))


def test_changing_scales_leave_nothing_behind():
    attn, layout = make_attention("ring", Comm("alone", 0, 1)), Layout.zigzag([0, 3, 8], 1)
    q, k, v = local(layout, 0)
    kept = []
    for i in range(100):
        attn(q, k, v, layout, causal=True, softmax_scale=1 + i / 100)
        kept.append(len(layout.geometry.derived(("once",), dict)._results))
    assert kept[-1] == kept[50] < 50


def test_backward_outlives_the_layout():
    def forward(comm):
        attn, layout = make_attention("ring", comm), Layout.zigzag(61, 1)  # no other is equal
        q, k, v = local(layout, 0)
        out = attn(q, k, v, layout, causal=True)
        geometry = weakref.ref(layout.geometry)
        del attn, layout
        gc.collect()
        assert geometry() is not None
        out.sum().backward()
        assert q.grad.isfinite().all()
        del out
        gc.collect()
        return geometry() is None

    assert virtual(1, forward) == [True]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lse_may_be_differentiated_on_some_ranks_only(strategy):
    """Where autograd has no gradient of lse, the others still count on what goes with it."""
    layout = Layout.zigzag([0, 30, 70], 4)

    def gradients(comm, on_all):
        q, k, v = local(layout, comm.rank, heads=4, kv_heads=2)
        out, lse = module(strategy, comm)(q, k, v, layout, causal=True, return_lse=True)
        loss = out.square().sum()
        if comm.rank == 1:
            loss = loss + lse.square().sum()
        elif on_all:
            loss = loss + 0 * lse.sum()
        loss.backward()
        return [q.grad, k.grad, v.grad]

    for some, every in zip(virtual(4, gradients, False), virtual(4, gradients, True), strict=True):
        assert all(
            torch.allclose(x, y, rtol=0, atol=1e-13) for x, y in zip(some, every, strict=True)
        )


@few_rows()
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autocast_casts_as_sdpa_does(strategy, backend):
    def forward(comm):
        layout = Layout.zigzag(64, comm.size)
        attn = module(strategy, comm)
        q, k, v = local(layout, comm.rank, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out, lse = attn(q, k, v, layout, causal=True, return_lse=True)
            exact = attn(q.double(), k.double(), v.double(), layout, causal=True)
        expected, expected_lse = attn(
            *(x.bfloat16() for x in (q, k, v)), layout, causal=True, return_lse=True
        )
        out.float().sum().backward()
        assert (
            out.dtype == torch.bfloat16
            and exact.dtype == torch.float64
            and q.grad.dtype == torch.float32
        )
        return torch.equal(out, expected) and torch.equal(lse, expected_lse)

    with use_backend(backend):
        assert virtual(2, forward) == [True, True]


def test_the_backend_of_forward_holds_for_backward(monkeypatch):
    from seqpar.softmax.backends import aten, reference

    def forward(comm):
        layout, used = Layout.zigzag(16, 1), []
        q, k, v = local(layout, 0)
        with use_backend("reference"):
            out = make_attention("ring", comm)(q, k, v, layout, causal=True)
        for backend in (aten, reference):
            original = backend.backward
            monkeypatch.setattr(
                backend, "backward", lambda *x, b=backend, f=original: (used.append(b), f(*x))
            )
        out.sum().backward()
        return used

    assert virtual(1, forward) == [[reference]]
    with (
        pytest.raises(ValueError, match=r"backend must be one of .*'aten', .*got 'fast'"),
        use_backend("fast"),
    ):
        pass


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strided_gradient_and_strided_inputs(strategy):
    def forward(comm):
        layout = Layout.zigzag(24, comm.size)
        attn = module(strategy, comm)
        q, k, v = local(layout, comm.rank)
        attn(q, k, v, layout, causal=True).sum().backward()  # a gradient of stride 0
        expected = q.grad.clone()
        q.grad = None
        turned = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v))
        attn(*turned, layout, causal=True).sum().backward()
        return torch.allclose(q.grad, expected, rtol=0, atol=1e-13)

    assert virtual(2, forward) == [True, True]


def test_only_lse_may_be_differentiated():
    def forward(comm):
        layout = Layout.zigzag(12, 1)
        q, k, v = local(layout, 0)
        _, lse = make_attention("ring", comm)(q, k, v, layout, causal=False, return_lse=True)
        lse.sum().backward()
        scores = torch.einsum("nhd,md->hnm", q, k[:, 0]) * 8**-0.5
        (expected,) = torch.autograd.grad(scores.logsumexp(-1).sum(), q)
        return torch.allclose(q.grad, expected, rtol=0, atol=1e-13) and not v.grad.any()

    assert virtual(1, forward) == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_share_no_memory(dtype):
    """What works in place on one of them, such as clipping, leaves the others alone."""

    def backward(comm):
        q, k, v = local(Layout.zigzag(12, 1), 0, dtype=dtype)
        make_attention("ring", comm)(q, k, v, Layout.zigzag(12, 1), causal=True).sum().backward()
        return len({x.grad.untyped_storage().data_ptr() for x in (q, k, v)})

    assert virtual(1, backward) == [3]
