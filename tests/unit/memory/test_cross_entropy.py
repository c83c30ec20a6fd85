"""Losses of a head in chunks equal those of all logits at once, forward and backward."""

import weakref
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.memory import chunked_cross_entropy, chunked_log_probabilities

TOKENS, CHANNELS, WORDS = 37, 12, 50


def operands(dtype=torch.float64, shape=(TOKENS,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, CHANNELS, generator=generator, dtype=torch.float64)
    weight, bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64)
        for size in ((WORDS, CHANNELS), (WORDS,))
    )
    labels = torch.randint(0, WORDS, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    return [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)], labels


def capped(x, softcap):
    return softcap * torch.tanh(x / softcap) if softcap else x


def reference(
    hidden, weight, labels, bias=None, softcap=0.0, label_smoothing=0.0, z_loss=0.0, weights=1,
    logit_scale=1.0,
):  # fmt: skip
    """The same loss from all logits, in fp64."""
    z = hidden.double() @ weight.double().T
    z = capped(logit_scale * (z if bias is None else z + bias.double()), softcap)
    losses = functional.cross_entropy(
        z.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=label_smoothing
    ).view(labels.shape)
    losses = losses + z_loss * z.logsumexp(-1).square() * (labels != -100)
    return (losses * weights).sum()


OPTIONS = [
    {},
    {"softcap": 3.0},
    {"label_smoothing": 0.2},
    {"z_loss": 0.1},
    {"softcap": 3.0, "label_smoothing": 0.2, "z_loss": 0.1, "logit_scale": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(TOKENS,), (3, 5), (1,)])
def test_the_loss_and_its_gradients_equal_those_of_all_logits(options, has_bias, shape):
    (hidden, weight, bias), labels = operands(shape=shape)
    bias = bias if has_bias else None
    weights = torch.rand(shape, dtype=torch.float64).requires_grad_()
    inputs = [x for x in (hidden, weight, bias, weights) if x is not None]
    found = chunked_cross_entropy(
        hidden, weight, labels, 8, bias=bias, token_weights=weights, **options
    )
    expected = reference(hidden, weight, labels, bias, weights=weights, **options)
    torch.testing.assert_close(found, expected)
    for x, y in zip(
        torch.autograd.grad(2 * found, inputs), torch.autograd.grad(2 * expected, inputs),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_log_probabilities_and_entropies_equal_those_of_all_logits(softcap):
    (hidden, weight, bias), labels = operands()
    found = chunked_log_probabilities(hidden, weight, labels, 8, bias=bias, softcap=softcap)
    logs = capped(hidden @ weight.T + bias, softcap).log_softmax(-1)
    counted = labels != -100
    picked = logs.gather(-1, labels.clamp(min=0)[:, None])[:, 0] * counted
    entropy = -(logs.exp() * logs).sum(-1) * counted
    torch.testing.assert_close(tuple(found), (picked, entropy))
    factors = torch.randn(2, TOKENS, dtype=torch.float64)
    results = [
        torch.autograd.grad((factors * torch.stack(tuple(x))).sum(), [hidden, weight, bias])
        for x in (found, (picked, entropy))
    ]
    torch.testing.assert_close(*results)


def test_words_that_are_masked_out_have_no_gradient():
    (hidden, weight, _), labels = operands()
    bias = torch.zeros(WORDS, dtype=torch.float64)
    bias[WORDS // 2 :] = -torch.inf
    labels = torch.where(labels < WORDS // 2, labels, 0)
    found = chunked_log_probabilities(hidden, weight, labels, bias=bias)
    _, d_weight = torch.autograd.grad(sum(x.sum() for x in found), [hidden, weight])
    logs = (hidden @ weight[: WORDS // 2].T).log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1) * (labels != -100)
    torch.testing.assert_close(found.entropy, entropy)
    assert d_weight.isfinite().all() and not d_weight[WORDS // 2 :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_fp32(dtype):
    """The loss is that of the rounded operands; gradients are rounded once."""
    (hidden, weight, _), labels = operands(dtype)
    found = chunked_cross_entropy(hidden, weight, labels, 8)
    expected = reference(hidden, weight, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    half_a_place = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    for x, y in zip(
        torch.autograd.grad(found, [hidden, weight]),
        torch.autograd.grad(expected, [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(x.double(), y.double(), rtol=half_a_place, atol=1e-5)


def test_chunks_change_nothing_but_rounding():
    (hidden, weight, _), labels = operands()
    expected = chunked_cross_entropy(hidden, weight, labels, TOKENS)
    for chunk in (1, 5, TOKENS - 1, 10 * TOKENS):
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, labels, chunk), expected)


def test_frozen_parts_and_tied_heads():
    """A frozen head gets no gradient; a tied one gets the sum of both."""
    (hidden, weight, _), labels = operands()
    chunked_cross_entropy(hidden, weight.detach(), labels, 8).backward()
    (expected,) = torch.autograd.grad(reference(hidden, weight, labels), hidden)
    torch.testing.assert_close(hidden.grad, expected)
    tokens = torch.randint(0, WORDS, (TOKENS,))
    for loss in (chunked_cross_entropy, reference):
        weight.grad = None
        loss(weight[tokens], weight, labels).backward()
        expected, found = weight.grad, expected
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_head_with_lora_whose_hidden_is_used_again_and_whose_loss_is_scaled(dtype):
    """The hidden states also enter another term, and the base weight is frozen."""
    (hidden, weight, _), labels = operands(dtype)
    a, b = (0.3 * torch.randn(*x, dtype=dtype) for x in ((2, CHANNELS), (WORDS, 2)))
    inputs = hidden, *(x.requires_grad_() for x in (a, b))
    found, expected = (
        torch.autograd.grad(
            2.0**16 * (loss(hidden, weight.detach() + 0.5 * b @ a, labels) + hidden.exp().sum()),
            inputs,
        )
        for loss in (partial(chunked_cross_entropy, chunk=8), reference)
    )
    close = {} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2.0**16 * 1e-5}
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **close)


def test_no_tokens_and_ignored_ones():
    (hidden, weight, _), labels = operands()
    for h, y in ((hidden[:0], labels[:0]), (hidden, torch.full_like(labels, -100))):
        loss = chunked_cross_entropy(h, weight, y)
        gradients = torch.autograd.grad(loss, [h, weight])
        assert loss == 0 and not any(x.any() for x in gradients)


def test_weights_of_ignored_tokens_count_for_nothing():
    (hidden, weight, _), labels = operands()
    weights = torch.where(labels == -100, torch.nan, 1.0).requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, labels, 8, token_weights=weights)
    loss.backward()
    assert loss.isfinite()
    for x in (hidden, weight, weights):
        assert x.grad.isfinite().all()


def test_meta_tensors_have_a_loss_and_gradients():
    (hidden, weight, _), labels = operands(torch.bfloat16)
    hidden, weight = (x.detach().to("meta").requires_grad_() for x in (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, labels.to("meta"), 8)
    loss.backward()
    assert loss.is_meta and weight.grad.shape == weight.shape


def test_autocast_casts_as_a_linear_layer():
    (hidden, weight, _), labels = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(hidden, weight, labels)
    expected = chunked_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    assert torch.equal(found, expected)
    found.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


class Peak(TorchDispatchMode):
    """Watches the most bytes that tensors of operators in its context take."""

    def __init__(self):
        super().__init__()
        self.held, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.held:
                storage = x.untyped_storage()
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.held.values()))
        return result


def test_the_logits_of_all_tokens_are_never_held():
    """Both passes hold at most four copies of a chunk's logits, and numbers per token or word."""
    tokens, channels, words, chunk = 4096, 8, 2048, 256
    hidden = torch.randn(tokens, channels, requires_grad=True)
    weight = torch.randn(words, channels, requires_grad=True)
    labels = torch.randint(0, words, (tokens,))
    peaks = []
    for rows in (chunk, tokens):
        with Peak() as watch:
            chunked_cross_entropy(hidden, weight, labels, rows).backward()
        peaks.append(watch.peak)
    others = 4 * (10 * tokens + 4 * (tokens + words) * channels)
    assert peaks[0] <= 4 * 4 * chunk * words + others < 4 * tokens * words <= peaks[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"weight": torch.zeros(WORDS, 13)},
            r"^weight must be \(V, 12\), got \(50, 13\)",
        ),
        ({"weight": torch.zeros(WORDS, CHANNELS)}, "^weight must have hidden's dtype"),
        ({"labels": torch.zeros(TOKENS - 1).long()}, r"^labels must be \(37,\), one label per row"),
        ({"labels": torch.zeros(TOKENS)}, "^labels must be int32 or int64, got torch.float32"),
        ({"labels": torch.full((TOKENS,), WORDS)}, "^labels must be from 0 to 49 or ignore_index"),
        ({"labels": torch.full((TOKENS,), -1)}, "^labels must be from 0 to 49 .*, got -1"),
        ({"bias": torch.zeros(3).double()}, r"^bias must be \(50,\), one number per word, got"),
        ({"hidden": torch.zeros(TOKENS, CHANNELS).long()}, "^hidden must be fp64, fp32, bf16 or"),
        ({"hidden": torch.tensor(1.0)}, r"^hidden must be \(\.\.\., C\), got \(\)"),
        ({"labels": [0] * TOKENS}, "^labels must be a tensor, got list"),
        ({"weight": None}, "^weight must be a tensor, got NoneType"),
        (
            {"labels": torch.zeros(TOKENS, device="meta").long()},
            "^labels must be on hidden's device",
        ),
        ({"token_weights": [1.0] * TOKENS}, "^token_weights must be a tensor, got list"),
        ({"chunk": 0}, "^chunk must be at least 1"),
        ({"softcap": -1.0}, "^softcap must be 0 or more"),
        ({"softcap": torch.inf}, "^softcap must be 0 or more, and finite, got inf"),
        ({"softcap": "much"}, "^softcap must be a number, got 'much'"),
        ({"chunk": 2.5}, "^chunk must be an integer, got 2.5"),
        ({"logit_scale": torch.nan}, "^logit_scale must be finite, got nan"),
        ({"z_loss": torch.inf}, "^z_loss must be finite, got inf"),
        ({"group": "all"}, "^group must be a process group"),
        ({"weight": torch.zeros(0, CHANNELS).double(), "bias": None}, "^weight must have a row"),
        ({"label_smoothing": 1.5}, "^label_smoothing must be from 0 to 1"),
        ({"token_weights": torch.ones(3)}, r"^token_weights must be \(37,\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, said):
    (hidden, weight, bias), labels = operands()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    with pytest.raises(ValueError, match=said):
        chunked_cross_entropy(**arguments | change)
