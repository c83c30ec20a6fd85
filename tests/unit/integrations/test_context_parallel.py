"""context_parallel: a model that knows nothing of ranks, and buffers that are sharded in place."""

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import CheckpointError, checkpoint

import seqpar
from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from seqpar.integrations.context_parallel import _ToAllRanks as ToAllRanks
from tests.support.cases import STRATEGIES, module
from tests.support.compiling import compiling_elsewhere
from tests.support.ranks import virtual
from tests.support.tiers import few_rows
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


@few_rows()
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
            with pytest.raises(ValueError, match="use_reentrant must be False for checkpoints"):
                checkpoint(attend, q, use_reentrant=True)
        with pytest.raises(CheckpointError, match="different number of tensors"):
            loss.backward()
        with torch.no_grad(), seqpar.context_parallel(comm, LAYOUT):
            return attend(q).shape == q.shape

    assert virtual(2, on_rank) == [True, True]


@pytest.mark.parametrize("wrapped", [again, lambda f: lambda x: seqpar.checkpoint(f, x)])
def test_checkpoints_refuse_another_layouts_context(wrapped):
    """Backward of a micro-batch may run in the context of the next, whose tensors are alike."""

    def on_rank(comm):
        q = torch.ones(4, 12, 8).requires_grad_()
        with seqpar.context_parallel(comm, Layout.zigzag([0, 4, 24], 2)):
            loss = wrapped(attend)(q).sum()
        other = seqpar.context_parallel(comm, Layout.zigzag([0, 8, 24], 2))
        with other, pytest.raises(CheckpointError, match="different metadata"):
            loss.backward()

    virtual(2, on_rank)


class Exported(nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q)


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
def test_unsendable_calls_are_refused_and_undone(call, message):
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
    (
        {"buffers": [IDS, IDS], "buffer_seq_dims": [0, 0]},
        r"buffers\[1\] must not be the same tensor as an earlier buffer",
    ),
    ({"buffers": [3], "buffer_seq_dims": [0]}, r"buffers\[0\] must be a tensor"),
    (
        {"buffers": [nn.Parameter(TABLE)], "buffer_seq_dims": [0]},
        r"buffers\[0\] must be a plain tensor that requires no gradient, got a Parameter that "
        "requires one: detach it",
    ),
    ({"no_restore_buffers": [IDS]}, r"no_restore_buffers\[0\] must be one of the tensors"),
    ({"layout": Layout.zigzag(30, 3)}, "layout must be for the group's 2 ranks"),
    ({"layout": 30}, "layout must be a seqpar.Layout"),
    ({"group": None}, r"group must be a process group .* call torch.distributed.init_process_gr"),
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


SCORES = X @ X.transpose(-2, -1)
BY_HAND = [
    lambda scores: torch.softmax(scores, -1),
    lambda scores: torch.softmax(scores, 3),
    lambda scores: scores.softmax(dim=-1),
    lambda scores: F.softmax(scores, dim=-1),
    lambda scores: F.softmax(input=scores, dim=-1),
    nn.Softmax(dim=-1),
    lambda scores: F.log_softmax(scores, -1),
    lambda scores: scores.log_softmax(-1),
    lambda scores: torch.logsumexp(scores, (-1,)),
    lambda scores: scores.logsumexp(-1, keepdim=True),
    lambda scores: torch.special.softmax(scores, -1),
    lambda scores: torch._softmax(scores, -1, False),
    lambda scores: torch.ops.aten.softmax(scores, -1),
    lambda scores: torch.ops.aten.softmax.int(scores, -1),
    lambda scores: torch.ops.aten._softmax.default(scores, -1, False),
    lambda scores: torch.masked.softmax(scores, -1),
    torch.compile(lambda scores: torch.softmax(scores, -1), backend="eager"),
]


def alone():
    """The mode of a context whose ranks exchange nothing."""
    return ToAllRanks(module("ring", Comm("alone", 0, 2)), LAYOUT)


@pytest.mark.parametrize("softmax", BY_HAND)
def test_softmax_by_hand_warns(softmax):
    with alone(), pytest.warns(UserWarning, match="attends to this rank's keys only"):
        softmax(SCORES)


def test_other_softmaxes_do_not_warn():
    """Gates and classes are no scores: their last dimensions are others."""
    with alone():
        torch.softmax(X, -1)
        torch.softmax(SCORES, 1)
        torch.softmax(torch.zeros(15), 0)
        F.softmax(torch.zeros(15, 9), dim=-1)
        torch.softmax(torch.zeros(15, 15, requires_grad=True), 0).sum().backward()


COUNTED = [
    lambda: torch.arange(15),
    lambda: torch.arange(0, 15),
    lambda: torch.arange(0, 15, 1, dtype=torch.float32),
    lambda: torch.arange(start=0, end=15),
    lambda: torch.arange(end=15, device="cpu"),
]


@pytest.mark.parametrize("count", COUNTED)
def test_positions_counted_on_a_rank_warn(count):
    with alone(), pytest.warns(UserWarning, match=r"take positions from layout.position_ids"):
        count()


def test_other_ranges_do_not_warn():
    with alone():
        torch.arange(0, 15, 2), torch.arange(1, 15), torch.arange(30), torch.arange(15.0)
        torch.arange(0, 30, 2), LAYOUT.position_ids(0), LAYOUT.shard(torch.zeros(30), 0)


def mha(**options):
    """A call of nn.MultiheadAttention."""
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    return lambda training: attend.train(training)(X[0], X[0], X[0], **options)


def encoder(kind=nn.TransformerEncoderLayer, inputs=1):
    layer = kind(8, 2, 8, batch_first=True)
    return lambda training: layer.train(training)(*[X[0]] * inputs)


def stacked(training):
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)(X[0])


def fast_encoder(training):
    """The kernel of the fast path of nn.TransformerEncoderLayer."""
    layer, attend = nn.TransformerEncoderLayer(8, 2, 8), nn.MultiheadAttention(8, 2)
    weights = attend.in_proj_weight, attend.in_proj_bias, *attend.out_proj.parameters()
    norms = [*layer.norm1.parameters(), *layer.norm2.parameters()]
    linears = [*layer.linear1.parameters(), *layer.linear2.parameters()]
    return torch._transformer_encoder_layer_fwd(
        X[0], 8, 2, *weights, False, False, 1e-5, *norms, *linears
    )


def native(training):
    attend = nn.MultiheadAttention(8, 2)
    weights = attend.in_proj_weight, attend.in_proj_bias, *attend.out_proj.parameters()
    return torch._native_multi_head_attention(X[0], X[0], X[0], 8, 2, *weights)


def compiled(function):
    """The call within torch.compile."""
    return lambda training: torch.compile(lambda: function(training), backend="eager")()


ATEN, TORCHS = torch.ops.aten, "multi_head_attention_forward"
EXPORTED = torch.export.export(Exported(), (X,)).module()
OTHERS = {
    "weights": (mha(need_weights=True), TORCHS),
    "no weights": (mha(need_weights=False), TORCHS),
    "compiled": (compiled(mha()), TORCHS),
    "encoder": (encoder(), TORCHS),
    "compiled encoder": (compiled(encoder()), f"{TORCHS}|_transformer_encoder_layer_fwd"),
    "stacked": (stacked, TORCHS),
    "decoder": (encoder(nn.TransformerDecoderLayer, 2), TORCHS),
    "fast encoder": (fast_encoder, "_transformer_encoder_layer_fwd"),
    "native": (native, "_native_multi_head_attention"),
    "flex": (lambda _: flex_attention(X, X, X), "flex_attention"),
    "aten": (lambda _: ATEN.scaled_dot_product_attention(X, X, X), "scaled_dot_product_attention"),
    "aten default": (
        lambda _: ATEN.scaled_dot_product_attention.default(X, X, X),
        "scaled_dot_product_attention.default",
    ),
    "cpu": (
        lambda _: ATEN._scaled_dot_product_flash_attention_for_cpu.default(X, X, X),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "compiled cpu": (
        compiled(lambda _: ATEN._scaled_dot_product_flash_attention_for_cpu(X, X, X)),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "math": (
        lambda _: ATEN._scaled_dot_product_attention_math(X, X, X),
        "_scaled_dot_product_attention_math",
    ),
    "exported": (lambda _: EXPORTED(X), "scaled_dot_product_attention.default"),
}


@few_rows()
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_is_refused_by_name(name, training):
    call, message = OTHERS[name]
    with (
        alone(),
        torch.set_grad_enabled(training),
        pytest.raises(ValueError, match=f"^({message})\\S* must not be called within context"),
    ):
        call(training)


def refuse_while_another_thread_compiles():
    call, message = OTHERS["math"]
    with compiling_elsewhere(), alone(), pytest.raises(ValueError, match=f"^{message}"):
        call(False)


@pytest.mark.exhaustive
def test_other_attention_is_refused_while_another_thread_compiles():
    """In a new process: after some tests of a whole run, torch compiles nothing in a thread."""
    name = refuse_while_another_thread_compiles.__name__
    program = f"from {__name__} import {name}; {name}()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


SDPA = {
    "by name": imported_by_name,
    "of torch._C": torch._C._nn.scaled_dot_product_attention,
    "partial": partial(F.scaled_dot_product_attention),
    "by keywords": lambda q, k, v: F.scaled_dot_product_attention(value=v, key=k, query=q),
    "compiled": torch.compile(imported_by_name, backend="eager"),
}


@pytest.mark.parametrize("name", SDPA)
def test_sdpa_under_any_name_is_exact(name):
    x = torch.randn(1, 2, 30, 4, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(x, x, x)
    layout = Layout.contiguous(30, 2)

    def on_rank(comm):
        own = layout.shard(x, comm.rank, dim=2)
        with seqpar.context_parallel(comm, layout):
            return SDPA[name](own, own, own)

    assert (torch.cat(virtual(2, on_rank), 2) - expected).abs().max() < 1e-6
