"""A module in chunks computes what the plain module computes, forward and backward."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqpar.memory import tiled
from tests.unit.memory.test_cross_entropy import Peak


class Gated(nn.Module):
    """An MLP as in Llama, with a norm; `unused` has no part in the result."""

    def __init__(self, channels=8, width=24, dtype=torch.float64):
        super().__init__()
        self.norm = nn.RMSNorm(channels, dtype=dtype)
        self.up, self.gate = (nn.Linear(channels, width, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(width, channels + 1, dtype=dtype)
        self.unused = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x, scale=1.0):
        x = self.norm(x)
        return scale * self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def made(**options):
    torch.manual_seed(0)
    return Gated(**options)


def gradients(module, x, loss):
    module.zero_grad()
    x.grad = None
    loss.backward()
    return {"x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("shape", [(13, 8), (2, 13, 8), (2, 3, 10, 8), (0, 8), (4, 8)])
@pytest.mark.parametrize("x_has_gradient", [True, False])
def test_results_and_gradients_equal_the_plain_modules(shape, x_has_gradient):
    plain, x = made(), torch.randn(*shape, dtype=torch.float64, requires_grad=x_has_gradient)
    module = tiled(copy.deepcopy(plain), 5)
    factor = torch.randn(*shape[:-1], 9, dtype=torch.float64)
    found, expected = ((y(x, scale=2.0), y) for y in (module, plain))
    torch.testing.assert_close(found[0], expected[0])
    results = [gradients(y, x, (factor * out).sum()) for out, y in (found, expected)]
    torch.testing.assert_close(*results)
    assert results[0]["unused"] is None


@pytest.mark.parametrize("frozen", [["up.weight"], ["norm.weight", "down.bias"], "all"])
def test_frozen_parameters_get_no_gradient(frozen):
    plain = made()
    for name, p in plain.named_parameters():
        p.requires_grad_(frozen != "all" and name not in frozen)
    x = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    module = tiled(copy.deepcopy(plain), 5)
    torch.testing.assert_close(*(gradients(y, x, y(x).square().sum()) for y in (module, plain)))


def test_autocast_and_checkpoints_hold_in_backward_too():
    plain = made(dtype=torch.float32)
    module, x = tiled(copy.deepcopy(plain), 5), torch.randn(13, 8, requires_grad=True)
    results = []
    for y in (module, plain):
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(y, x, use_reentrant=False)
        assert out.dtype == torch.bfloat16
        results.append(gradients(y, x, out.float().square().sum()))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_gradients_are_summed_in_fp32():
    """Ones that are added in bf16 stop at 256."""
    module = tiled(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), 1)
    module(torch.ones(1000, 1, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.item() == 1000


def test_a_chunks_intermediates_are_held_and_no_more():
    tokens, width, chunk = 4096, 512, 256
    x = torch.randn(tokens, 8, requires_grad=True)
    peaks = []
    for module in (
        tiled(made(width=width, dtype=torch.float32), chunk),
        made(width=width, dtype=torch.float32),
    ):
        with Peak() as watch:
            module(x).sum().backward()
        peaks.append(watch.peak)
    assert peaks[0] < 4 * width * tokens < peaks[1]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_computes_with_its_own_parameters(again):
    module = tiled(made(), 5)
    other, x = again(module), torch.randn(13, 8, dtype=torch.float64)
    assert other.state_dict().keys() == made().state_dict().keys()
    with torch.no_grad():
        other.down.bias += 1
        torch.testing.assert_close(other(x), module(x) + 1)


def test_a_parameters_hook_runs_once():
    plain = made()
    module, x = tiled(copy.deepcopy(plain), 5), torch.randn(13, 8, dtype=torch.float64)
    for y in (module, plain):
        y.up.weight.register_hook(lambda gradient: 3 * gradient)
    torch.testing.assert_close(*(gradients(y, x, y(x).square().sum()) for y in (module, plain)))


def test_backward_draws_the_random_numbers_of_forward():
    """The module is linear in its input and in each weight, so products with gradients agree."""
    module = nn.Sequential(
        nn.Linear(8, 16, False, dtype=torch.float64),
        nn.Dropout(),
        nn.Linear(16, 3, False, dtype=torch.float64),
    )
    tiled(module, 5)
    x = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    out = module(x)
    torch.rand(3)
    state = torch.get_rng_state()
    out.backward(factor := torch.randn_like(out, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), state)
    for leaf in (x, *module.parameters()):
        torch.testing.assert_close((leaf * leaf.grad).sum(), (factor * out).sum())


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, what):
        if what == "its input":
            x.mul_(2)
        elif what == "weight":
            self.weight.add_(1)
        elif what == "calls":
            self.calls = self.calls + 1
        return self.weight * x


@pytest.mark.parametrize("what", ["its input", "weight", "calls"])
def test_changes_in_place_are_refused(what):
    with pytest.raises(ValueError, match=f"must change no tensor in place, .* or replaced {what}$"):
        tiled(Changing(), 2)(torch.zeros(5, 2), what=what)
    with pytest.raises(ValueError, match=r"or replaced (running_mean|num_batches_tracked)$"):
        tiled(nn.BatchNorm1d(2), 2)(torch.zeros(6, 2))


class Outside(nn.Module):
    """Computes with a weight that it does not hold as a parameter."""

    def __init__(self, weight):
        super().__init__()
        self.weights = [weight]

    def forward(self, x):
        return x * self.weights[0]


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_that_would_be_lost_are_refused(is_leaf):
    weight = torch.ones(2, requires_grad=True)
    module = tiled(Outside(weight if is_leaf else 2 * weight), 2)
    out = module(torch.zeros(5, 2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"computes with a tensor \(2,\) that is none of its"):
        out.sum().backward()


def test_short_calls_in_the_same_autocast_keep_their_gradients():
    plain = made(dtype=torch.float32)
    module, x = tiled(copy.deepcopy(plain), 5), torch.randn(13, 8)
    results = []
    for y in (module, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y(x)
            results.append(gradients(y, x, y(x[:4]).float().square().sum()))
            y(x)
            results.append(gradients(y, x, y(x).float().square().sum()))
    torch.testing.assert_close(results[:2], results[2:], rtol=2e-2, atol=2e-2)


def test_results_that_depend_on_no_parameter_have_no_gradient():
    module = nn.Identity()
    module.unused = nn.Parameter(torch.zeros(3))
    tiled(module, 2)(torch.zeros(5, 2)).sum().backward()
    assert module.unused.grad is None


def test_meta_tensors_have_results_and_gradients():
    module, x = tiled(made().to("meta"), 5), torch.empty(13, 8, dtype=torch.float64, device="meta")
    assert module(x).shape == (13, 9)
    module(x).sum().backward()
    assert module.up.weight.grad.is_meta


class Wrong(nn.Module):
    def forward(self, x, y=None):
        return x.mean(-2) if y is None else x + y


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tiled(torch.relu), "^module must be a torch.nn.Module"),
        (lambda: tiled(made(), 0), "^chunk must be at least 1"),
        (lambda: tiled(tiled(made())), "^module must have the forward of its class.* already"),
        (lambda: tiled(Wrong(), 2)(torch.zeros(5, 2)), "^a tiled module must return one tensor"),
        (lambda: tiled(Wrong(), 2)(torch.zeros(5, 2), torch.zeros(5, 2)), "got further tensors"),
        (
            lambda: tiled(Wrong(), 2)(torch.zeros(5, 2), y=[torch.zeros(5, 2)]),
            "got further tensors",
        ),
        (lambda: tiled(Wrong(), 2)(y=torch.zeros(5, 2)), "as its first argument, got NoneType"),
        (lambda: tiled(made(), 2)(torch.zeros(5)), "takes one tensor"),
        (lambda: tiled(made(), 2)((torch.zeros(5, 2),)), "takes one tensor .* got tuple"),
    ],
)
def test_what_cannot_be_tiled_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
