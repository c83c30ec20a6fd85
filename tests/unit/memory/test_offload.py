"""offload: the same gradients, and a share of the bytes in host memory."""

import gc
import weakref

import pytest
import torch

import seqpar
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

LAYOUT = seqpar.Layout.zigzag([0, 100, 256], 2)


def model():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    return torch.nn.Sequential(*layers)


def gradients(ratio, **options):
    """The gradients of a model, with what the context counted."""
    network, x = model(), torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    with seqpar.offload(ratio, least=1024, simulate=True, **options) as kept:
        loss = network(x).square().sum()
    loss.backward()
    return [x.grad, *(p.grad for p in network.parameters())], kept


@few_rows()
@pytest.mark.parametrize("ahead", [0, 1, 100])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
def test_offload_keeps_gradient_bits_and_its_ratio(ratio, ahead):
    expected, _ = gradients(0.0)
    found, kept = gradients(ratio, ahead=ahead)
    assert all(map(torch.equal, expected, found))
    assert kept.saved_bytes == 13 * 128 * 64 * 4  # a linear's input, a GELU's, and the square's
    assert kept.copied_bytes <= ratio * kept.saved_bytes
    assert kept.copied_bytes > ratio * kept.saved_bytes - 128 * 64 * 4


def test_copies_are_freed_between_passes_and_after_backward():
    x = torch.randn(512, 64, requires_grad=True)
    with seqpar.offload(1.0, least=1024, simulate=True):
        hidden = x * 2
        loss = hidden.square().sum()
    freed = weakref.ref(hidden)
    gc.disable()
    try:
        del hidden
        assert freed() is None
        loss.backward()
    finally:
        gc.enable()


def test_a_graph_may_run_backward_twice():
    x = torch.randn(512, 8, requires_grad=True)
    with seqpar.offload(1.0, least=0, simulate=True):
        loss = (x * x).square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(loss, x))


def attend(comm, ratio):
    attn = seqpar.make_attention("ring", comm)
    generator = torch.Generator().manual_seed(comm.rank)
    tokens = LAYOUT.tokens_on(comm.rank)
    q, k, v = (torch.randn(tokens, 2, 16, generator=generator).requires_grad_() for _ in range(3))
    with seqpar.offload(ratio, least=0, simulate=True) as kept:
        loss = attn(q, k, v, LAYOUT, causal=True).square().sum()
    loss.backward()
    return [x.grad for x in (q, k, v)], kept.copied_bytes


def test_attentions_saved_tensors_may_be_copied():
    for (expected, none), (found, copied) in zip(
        virtual(2, attend, 0.0), virtual(2, attend, 1.0), strict=True
    ):
        assert none == 0 < copied
        assert all(map(torch.equal, expected, found))


def test_parameters_integers_and_small_tensors_stay():
    weight = torch.nn.Parameter(torch.ones(64, 64))
    table, index = torch.nn.Parameter(torch.ones(9, 64)), torch.zeros(4096, dtype=torch.int64)
    with seqpar.offload(1.0, least=1024, simulate=True) as kept:
        small = torch.ones(2, 64, requires_grad=True) @ weight.t()
        loss = small.exp().sum() + torch.nn.functional.embedding(index, table).sum()
    loss.backward()
    assert kept.copied_bytes == kept.saved_bytes == 0


class Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def test_aliases_of_parameters_stay():
    """In an enabled Hugging Face model, an autograd function makes them."""
    weight, other = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    x = torch.ones(2, 64, requires_grad=True)
    with seqpar.offload(1.0, least=1024, simulate=True) as kept:
        _, alias, hidden = Alias.apply(other, weight, torch.ones(64, 64, requires_grad=True))
        loss = (x @ alias.t()).sum() + (x @ alias).sum()
        assert kept.saved_bytes == 0
        loss = loss + hidden.exp().sum()
    loss.backward()
    assert kept.copied_bytes == 64 * 64 * 4
    assert other.grad is None or not other.grad.any()
    torch.testing.assert_close(weight.grad, torch.full((64, 64), 4.0))


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), "half"])
def test_a_ratio_that_is_none_is_named(ratio):
    with pytest.raises(ValueError, match="ratio must be"):
        seqpar.offload(ratio)


def test_host_tensors_are_copied_only_in_simulation():
    x = torch.randn(512, 64, requires_grad=True)
    with seqpar.offload(1.0, least=0) as kept:
        x.square().sum().backward()
    assert kept.saved_bytes == 0


def test_sparse_tensors_stay_and_complex_ones_are_copied():
    x = torch.randn(8, 8, requires_grad=True)
    with seqpar.offload(1.0, least=0, simulate=True) as kept:
        loss = torch.sparse.mm(torch.eye(8).to_sparse(), x).sum()
    loss.backward()
    assert kept.copied_bytes == 0 and torch.equal(x.grad, torch.ones(8, 8))
    z = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)
    with seqpar.offload(1.0, least=0, simulate=True) as kept:
        loss = (z * z).real.sum()
    loss.backward()
    assert kept.copied_bytes == 2 * 8 * 8 * 8 and torch.equal(z.grad, 2 * z.detach().conj())


def checkpointed(comm, ratio, ahead=2):
    """Gradients of two checkpointed blocks with attention, and what the context counted."""
    attn, generator = seqpar.make_attention("ring", comm), torch.Generator().manual_seed(0)
    mixes = [0.2 * torch.randn(32, 96, generator=generator) for _ in range(2)]
    inputs = torch.randn(LAYOUT.tokens_on(comm.rank), 32, generator=generator), *mixes

    def block(x, mix):
        q, k, v = (x @ mix).unflatten(1, (3, 2, 16)).unbind(1)
        return x + attn(q, k, v, LAYOUT, causal=True).flatten(1)

    y, *mixes = (x.requires_grad_() for x in inputs)
    with seqpar.offload(ratio, least=1024, simulate=True, ahead=ahead) as kept:
        for mix in mixes:
            y = seqpar.checkpoint(block, y, mix)
    sent = attn.sent_bytes
    loss = y.square().sum()
    loss.backward()
    return [x.grad for x in inputs], kept, attn.sent_bytes - sent


@pytest.mark.parametrize("ahead", [0, 4])
def test_what_checkpoints_keep_is_copied_to_the_host(ahead):
    """A block's inputs, and the out and lse of its attention, whose work is not repeated."""
    for expected, found in zip(
        virtual(2, checkpointed, 0.0), virtual(2, checkpointed, 1.0, ahead), strict=True
    ):
        assert all(map(torch.equal, found[0], expected[0])) and found[2] == expected[2]
        tokens = len(found[0][0])
        assert found[1].copied_bytes == found[1].saved_bytes
        assert found[1].saved_bytes == 2 * 4 * (tokens * (32 + 32 + 2) + 32 * 96)


def test_a_checkpoint_in_host_memory_refuses_a_second_backward():
    def run(comm):
        attn, x = seqpar.make_attention("ring", comm), torch.randn(256, 2, 16, requires_grad=True)
        layout = seqpar.Layout.zigzag(256, 1)
        with seqpar.offload(1.0, least=0, simulate=True):
            loss = seqpar.checkpoint(lambda x: attn(x.sin(), x, x, layout, causal=True), x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward an extra time"):
            loss.backward()

    virtual(1, run)
