"""seqpar.merge against attention over all keys at once, and what it refuses."""

import numpy as np
import pytest
import torch

import seqpar
from seqpar import Layout, make_attention
from seqpar.softmax.compute.partial import Partial
from tests.support.cases import rms
from tests.support.ranks import virtual


def attention(q, k, v, seen):
    """Return (out, lse) by definition, for q (T, H, D); seen is (T, keys)."""
    scores = torch.einsum("nhd,mhd->nhm", q, k).masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse.isneginf(), 0)
    return torch.einsum("nhm,mhd->nhd", torch.exp(scores - finite[..., None]), v), lse


def drawn(dtype=torch.float64, keys=12):
    generator = torch.Generator().manual_seed(0)
    shapes = (7, 3, 4), (keys, 3, 4), (keys, 3, 5)
    draws = [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]
    seen = torch.rand(7, keys, generator=generator) < 0.5
    seen[0], seen[1, :4], seen[2, 4:] = False, False, False  # no key at all, or none of a part
    return draws, seen


def losses(out, lse):
    return (out * out.detach().cos()).sum() + lse.masked_fill(lse.isneginf(), 0).sin().sum()


@pytest.mark.parametrize("cuts", [[12], [4, 8], [0, 4, 7, 1]])
def test_equals_attention_over_all_keys(cuts):
    (q, k, v), seen = drawn()
    seen[2] = True
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attention(*whole, seen | True)
    losses(*expected).backward()
    parts = [x.clone().requires_grad_() for x in (q, k, v)]
    split = [x.split(cuts) for x in (*parts[1:], (seen | True).T)]
    pairs = [attention(parts[0], a, b, c.T) for a, b, c in zip(*split, strict=True)]
    got = seqpar.merge(*zip(*pairs, strict=True))
    losses(*got).backward()
    results = [*got, *(x.grad for x in parts)]
    for x, y in zip(results, [*expected, *(x.grad for x in whole)], strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("leading", [(), (7,), (2, 7), (2, 3, 4)])
def test_kernels_get_rows_of_one_batch_entry(monkeypatch, leading):
    """On CUDA a kernel merges, which takes (B, T, H, D) only."""
    merge_rows, shapes = Partial.merge, []

    def recorded(self, rows, out, lse):
        shapes.append((out.dim(), lse.dim()))
        merge_rows(self, rows, out, lse)

    monkeypatch.setattr(Partial, "merge", recorded)
    out, lse = torch.randn(*leading, 3, 5), torch.randn(*leading, 3)
    merged, total = seqpar.merge([out, out], [lse, lse])
    assert shapes == [(4, 3)] * 2
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(total, lse + np.log(2))


def test_rows_without_keys_are_0_without_gradient():
    (q, k, v), seen = drawn()
    pairs = [attention(q, k[part], v[part], seen[:, part]) for part in (slice(4), slice(4, 12))]
    expected = attention(q, k, v, seen)
    leaves = [[x.detach().requires_grad_() for x in side] for side in zip(*pairs, strict=True)]
    out, lse = seqpar.merge(*leaves)
    assert torch.allclose(out, expected[0], rtol=0, atol=1e-13)
    assert torch.equal(lse.isneginf(), expected[1].isneginf()) and lse[0].isneginf().all()
    assert torch.allclose(lse[1:], expected[1][1:], rtol=0, atol=1e-13) and not out[0].any()
    (out.sum() + lse[1:].sum()).backward()
    for x in leaves[0] + leaves[1]:
        assert x.grad.isfinite().all() and not x.grad[0].any()


def test_gradients_are_the_derivatives():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    tensors += [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    leaves = [x.requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *x: seqpar.merge(x[:3], x[3:]), leaves)
    out, _ = seqpar.merge(leaves[:3], leaves[3:])
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_parts_are_rounded_once(dtype):
    (q, k, v), _ = drawn(keys=64)
    everything = torch.ones(7, 64, dtype=torch.bool)
    exact, _ = attention(q, k, v, everything)
    blocks = zip(k.split(4), v.split(4), strict=True)
    pairs = [attention(q, *block, everything[:, :4]) for block in blocks]
    outs, lses = zip(*pairs, strict=True)
    out, lse = seqpar.merge([x.to(dtype) for x in outs], [x.float() for x in lses])
    assert out.dtype == dtype and lse.dtype == torch.float32
    parts = rms(torch.cat([(x.to(dtype).double() - x) for x in outs]).numpy())
    assert rms((out.double() - exact).numpy()) <= parts


def test_it_merges_what_attention_returns():
    """Two calls over half of the keys each are one over all, forward and backward."""

    def compared(comm):
        attn, queries, keys = (
            make_attention("ring", comm),
            Layout.zigzag(6, 1),
            Layout.zigzag(10, 1),
        )
        generator = torch.Generator().manual_seed(0)
        x = [torch.randn(n, 2, 8, generator=generator, requires_grad=True) for n in (6, 20, 20)]

        def call(k, v, layout):
            return attn(x[0], k, v, queries, causal=False, kv_layout=layout, return_lse=True)

        whole = call(*x[1:], Layout.zigzag(20, 1))
        halves = [call(x[1][rows], x[2][rows], keys) for rows in (slice(10), slice(10, 20))]
        merged = seqpar.merge(*zip(*halves, strict=True))
        for a, b in zip(merged, whole, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        grads = [torch.autograd.grad(losses(*pair), x) for pair in (merged, whole)]
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*grads, strict=True))

    virtual(1, compared)


OUT, LSE = torch.zeros(5, 2, 4), torch.zeros(5, 2)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "outs must have at least one"),
        (OUT, [LSE], "outs must be a sequence of tensors, got Tensor"),
        ([OUT], [3.0], "lses must be a sequence of tensors"),
        ([OUT, OUT], [LSE], "lses must have one tensor per out, 2, got 1"),
        ([OUT[0, 0]], [LSE[0]], r"outs\[0\] must be \(…, H, Dv\)"),
        ([OUT.long()], [LSE], r"outs\[0\] must be .* of torch.int64"),
        ([OUT, OUT[:4]], [LSE, LSE], r"outs\[1\] must be \(5, 2, 4\) .*got \(4, 2, 4\)"),
        ([OUT, OUT.double()], [LSE, LSE], r"outs\[1\] must be .* of torch.float32 on cpu"),
        ([OUT, OUT.to("meta")], [LSE, LSE], r"outs\[1\] must be .* on cpu, got .* on meta"),
        ([OUT, OUT], [LSE, LSE[:, :1]], r"lses\[1\] must be \(5, 2\) of torch.float32 or"),
        ([OUT], [LSE.bfloat16()], r"lses\[0\] must be .*got \(5, 2\) of torch.bfloat16"),
    ],
)
def test_refusals_name_the_argument(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        seqpar.merge(outs, lses)
