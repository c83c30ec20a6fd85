"""context_parallel: a model that knows nothing of ranks, and buffers that are sharded in place."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import CheckpointError, checkpoint

import seqpar
from seqpar import Layout
from tests.support.cases import STRATEGIES, module
from tests.support.ranks import virtual
from tests.unit.integrations.test_sdpa import by_documents

CU = [0, 5, 22, 30]
TABLE = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]  # of positions, as RoPE's


class Block(nn.Module):
    """A transformer block on one device, whose positions come from a buffer."""

    def __init__(self, attend=F.scaled_dot_product_attention):
        super().__init__()
        self.qkv = nn.Linear(16, 32, dtype=torch.float64)
        self.out = nn.Linear(16, 16, dtype=torch.float64)
        self.register_buffer("table", TABLE.clone())
        self.attend = attend
        own = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
        for p in self.parameters():
            nn.init.normal_(p, std=0.25, generator=own)

    def forward(self, x):
        q, k, v = self.qkv(x + self.table).split([16, 8, 8], -1)  # GQA: 4 heads and 2
        heads_first = (y.unflatten(-1, (-1, 4)).transpose(-3, -2) for y in (q * self.table, k, v))
        out = self.attend(*heads_first, is_causal=True, enable_gqa=True)
        return x + self.out(out.transpose(-3, -2).flatten(-2))


def again(function):
    """The function as a checkpoint of torch's."""
    return lambda x: checkpoint(function, x, use_reentrant=False)


def trained(comm, strategy, layout, backward_within=False, wrapped=None):
    """The largest difference of the gradients, summed over ranks by the test, from one device's."""
    x = torch.randn(2, 30, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Block(imported_by_name)
    buffers, attn = [x, model.table], module(strategy, comm)
    before = [(y.clone(), y.data_ptr()) for y in buffers]
    with seqpar.context_parallel(
        None, layout, attn, buffers=buffers, buffer_seq_dims=[1, 0]
    ) as used:
        assert used is attn and x.shape[1] == model.table.shape[0] == layout.tokens_on(attn.rank)
        loss = (wrapped(model) if wrapped else model)(x).square().sum()
        if backward_within == "grad":
            grads = torch.autograd.grad(loss, list(model.parameters()))
        elif backward_within:
            loss.backward()
    if not backward_within:
        loss.backward()
    for y, (content, place) in zip(buffers, before, strict=True):
        assert torch.equal(y, content) and y.data_ptr() == place
    return grads if backward_within == "grad" else [p.grad for p in model.parameters()]


def differences(ranks, strategy, layout, **options):
    grads = virtual(ranks, lambda comm: trained(comm, strategy, layout, **options))
    model = Block(lambda *x, **y: by_documents(*x, **y))
    x = torch.randn(2, 30, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    sums = [sum(of_ranks) for of_ranks in zip(*grads, strict=True)]
    expected = [p.grad for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(sums, expected, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_one_devices(strategy):
    assert differences(2, strategy, Layout.striped(CU, 2, stripe=3)) <= 1e-11


@pytest.mark.parametrize("backward_within", [False, True])
def test_backward_may_be_within_or_outside(backward_within):
    """Outside it reads what was computed with, though the buffers are whole again."""
    layout = Layout.zigzag(CU, 3)
    assert differences(3, "ring", layout, backward_within=backward_within) <= 1e-11


@pytest.mark.parametrize("backward_within", [True, "grad"])
@pytest.mark.parametrize("wrapped", [again, lambda f: lambda x: seqpar.checkpoint(f, x)])
def test_checkpoints_call_it_again_within(wrapped, backward_within):
    options = {"backward_within": backward_within, "wrapped": wrapped}
    assert differences(2, "ring", Layout.zigzag(CU, 2), **options) <= 1e-11


def attend(q):
    return F.scaled_dot_product_attention(q, q, q)


def test_checkpoints_are_not_computed_again_elsewhere():
    """Where SDPA would be torch's own: one kind notices, the other is refused at once."""

    def on_rank(comm):
        q = X.clone().requires_grad_()
        with seqpar.context_parallel(comm, LAYOUT):
            loss = checkpoint(attend, q, use_reentrant=False).sum()
            with pytest.raises(ValueError, match="use_reentrant must be False of checkpoints"):
                checkpoint(attend, q, use_reentrant=True)
        with pytest.raises(CheckpointError, match="different number of tensors"):
            loss.backward()
        with torch.no_grad(), seqpar.context_parallel(comm, LAYOUT):
            return attend(q).shape == q.shape

    assert virtual(2, on_rank) == [True, True]


LAYOUT, X = Layout.contiguous(CU, 2), torch.zeros(2, 4, 15, 8)
CALLS = [
    (lambda: F.scaled_dot_product_attention(X, X, X, torch.ones(15, 15)), "attn_mask must be None"),
    (lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5), "dropout_p must be 0"),
    (lambda: F.scaled_dot_product_attention(*[X[:, :, :9]] * 3), "query must be"),
    (lambda: F.scaled_dot_product_attention(X, X[:, :2], X[:, :2]), "enable_gqa must be True"),
    (
        lambda: nn.MultiheadAttention(8, 2)(X[0], X[0], X[0]),
        "multi_head_attention_forward must not be called within context_parallel",
    ),
    (
        lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)(X[0]),
        "multi_head_attention_forward must not be called",
    ),
    (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(X, X, X),
        "_scaled_dot_product_flash_attention_for_cpu must not be called",
    ),
    (lambda: seqpar.context_parallel(None, LAYOUT).__enter__(), "must not be entered again"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[x[1] for x in CALLS])
def test_what_cannot_be_sent_is_refused_and_all_is_restored(call, message):
    whole = torch.arange(30.0)

    def refused(comm):
        buffer = whole.clone()
        with (
            pytest.raises(ValueError, match=message),
            seqpar.context_parallel(comm, LAYOUT, buffers=[buffer], buffer_seq_dims=[0]),
        ):
            call()
        assert torch.equal(buffer, whole)
        x = torch.ones(1, 1, 2, 4)
        return torch.equal(F.scaled_dot_product_attention(x, x, x), x)  # torch's own again

    assert virtual(2, refused) == [True, True]


def test_other_threads_are_not_in_the_context():
    def on_rank(comm):
        x, found = torch.ones(1, 1, 3, 4), []
        with seqpar.context_parallel(comm, LAYOUT):
            elsewhere = lambda: found.append(F.scaled_dot_product_attention(x, x, x))  # noqa: E731
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        return found[0].shape == x.shape

    assert virtual(2, on_rank) == [True, True]


def test_modules_may_be_called_in_the_context():
    """Its own operators are named for attention too."""

    def on_rank(comm):
        attn = module("ring", comm)
        q = torch.ones(15, 2, 4, requires_grad=True)
        with seqpar.context_parallel(None, LAYOUT, attn):
            attn(q, q, q, LAYOUT, causal=True).sum().backward()
        return q.grad.isfinite().all()

    assert all(virtual(2, on_rank))


def test_buffers_that_are_not_restored_stay_sharded():
    def on_rank(comm):
        kept, restored = torch.arange(30), torch.arange(60).reshape(2, 30)
        with seqpar.context_parallel(
            comm,
            LAYOUT,
            "ring",
            buffers=[kept, restored],
            buffer_seq_dims=[0, -1],
            no_restore_buffers={kept},
            check_ranks=True,
        ) as attn:
            assert torch.equal(restored, torch.arange(60).reshape(2, 30)[:, kept])
            assert "check_ranks=True" in str(attn)
        assert restored.shape == (2, 30)
        return kept

    assert torch.equal(torch.cat(virtual(2, on_rank)), torch.arange(30))


IDS = torch.arange(30)
WRONG = [
    ({"buffers": [IDS]}, "buffer_seq_dims must have one entry for each of the 1 buffers"),
    ({"buffers": [IDS, IDS[:9]], "buffer_seq_dims": [0, 0]}, r"buffers\[1\] must have the lay"),
    ({"buffers": [IDS], "buffer_seq_dims": [1]}, r"buffers\[0\] must have the layout's 30 tokens"),
    ({"buffers": [IDS], "buffer_seq_dims": [None]}, r"buffer_seq_dims\[0\] must be an integer"),
    ({"buffers": [IDS, IDS], "buffer_seq_dims": [0, 0]}, r"buffers\[1\] must not be .* twice"),
    ({"buffers": [3], "buffer_seq_dims": [0]}, r"buffers\[0\] must be a tensor"),
    (
        {"buffers": [nn.Parameter(TABLE)], "buffer_seq_dims": [0]},
        r"buffers\[0\] must be a plain tensor that requires no gradient",
    ),
    ({"no_restore_buffers": [IDS]}, r"no_restore_buffers\[0\] must be one of buffers"),
    ({"layout": Layout.zigzag(30, 3)}, "layout must be for the group's 2 ranks"),
    ({"layout": 30}, "layout must be a seqpar.Layout"),
    ({"group": None}, "group must be given"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[x[1] for x in WRONG])
def test_wrong_arguments_are_refused_before_anything_changes(changes, message):
    def refused(comm):
        arguments = {"group": comm, "layout": LAYOUT} | changes
        context = seqpar.context_parallel(**arguments)
        with pytest.raises(ValueError, match=message), context:
            pass
        with seqpar.context_parallel(comm, LAYOUT):
            return IDS.shape == (30,)

    assert virtual(2, refused) == [True, True]
