"""A vocabulary that tensor parallelism shards has the loss and gradients of one process."""

import re

import pytest
import torch

from seqpar.memory import chunked_cross_entropy, chunked_log_probabilities
from tests.support import huggingface as hf
from tests.support.ranks import virtual
from tests.unit.memory.test_cross_entropy import OPTIONS, WORDS, operands

BOUNDS = {
    2: (0, 20, WORDS),
    3: (0, 1, 30, WORDS),
}  # first words of the ranks, which hold uneven parts


def own_words(comm, x):
    first, last = BOUNDS[comm.size][comm.rank : comm.rank + 2]
    return x.detach()[first:last].clone().requires_grad_()


def on_rank(comm, options, dtype):
    """The loss, and the gradients of hidden, this rank's words and the tokens' weights."""
    (hidden, weight, bias), labels = operands(dtype)
    hidden = hidden.detach().requires_grad_()
    weight, bias = own_words(comm, weight), own_words(comm, bias)
    weights = torch.linspace(0, 1, len(labels)).to(dtype).requires_grad_()
    before = comm.sent_bytes
    loss = chunked_cross_entropy(
        hidden, weight, labels, 8, bias=bias, token_weights=weights, group=comm, **options
    )
    sent = comm.sent_bytes - before
    (2 * loss).backward()
    return loss.detach(), hidden.grad, weight.grad, bias.grad, weights.grad, sent


def alone(options, dtype):
    (hidden, weight, bias), labels = operands(dtype)
    weights = torch.linspace(0, 1, len(labels)).to(dtype).requires_grad_()
    loss = chunked_cross_entropy(
        hidden, weight, labels, 8, bias=bias, token_weights=weights, **options
    )
    return loss, *torch.autograd.grad(2 * loss, [hidden, weight, bias, weights])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranks_have_the_loss_and_gradients_of_one_process(options, ranks, dtype):
    loss, d_hidden, d_weight, d_bias, d_weights = alone(options, dtype)
    results = virtual(ranks, on_rank, options, dtype)
    close = {} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    for found in results:
        for x, y in zip((*found[:2], found[4]), (loss, d_hidden, d_weights), strict=True):
            torch.testing.assert_close(x, y, **close)
        assert torch.equal(found[1], results[0][1])
    torch.testing.assert_close(torch.cat([x[2] for x in results]), d_weight, **close)
    torch.testing.assert_close(torch.cat([x[3] for x in results]), d_bias, **close)


def test_the_bytes_of_forward_are_those_of_the_docstring():
    """Six numbers of each token to each other rank, beside the comparison of the calls."""
    sent = {x[5] for x in virtual(2, on_rank, {}, torch.float32)}
    compared = 8 + 64  # the number of words, and a digest
    assert sent == {37 * 24 + compared}


def log_probabilities(comm, masked):
    (hidden, weight, bias), labels = operands()
    if masked:  # all words of rank 0 are masked out
        bias = bias.detach().clone()
        bias[: BOUNDS[2][1]] = -torch.inf
        labels = torch.where((labels >= 0) & (labels < BOUNDS[2][1]), 30, labels)
    group, own = None, (weight, bias)
    if comm is not None:
        group, own = comm, (own_words(comm, weight), own_words(comm, bias))
    found = chunked_log_probabilities(hidden, own[0], labels, 8, bias=own[1], group=group)
    return [x.detach() for x in found], torch.autograd.grad(sum(x.sum() for x in found), hidden)[0]


@pytest.mark.parametrize("masked", [False, True])
def test_log_probabilities_and_entropies_over_ranks(masked):
    expected, d_hidden = log_probabilities(None, masked)
    for found, d_found in virtual(2, log_probabilities, masked):
        torch.testing.assert_close((found, d_found), (expected, d_hidden))


def refused(comm, change):
    (hidden, weight, bias), labels = operands()
    arguments = {"hidden": hidden, "labels": labels, "bias": own_words(comm, bias), "chunk": 8}
    arguments |= {"weight": own_words(comm, weight), "token_weights": torch.ones(len(labels))}
    if comm.rank == 1:
        arguments |= change
    return hf.refused(lambda: chunked_cross_entropy(**arguments, group=comm))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunk": 9}, "chunk must be the same on all ranks: rank 0 has 8, rank 1 has 9"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"softcap": -1.0}, "softcap must be 0 or more"),
        ({"ignore_index": 0.5}, "ignore_index must be an integer"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1"),
        ({"label_smoothing": 0.1}, "label_smoothing must be the same on all ranks"),
        ({"z_loss": 0.1}, "z_loss must be the same on all ranks"),
        ({"bias": None}, "bias must be the same on all ranks"),
        ({"token_weights": None}, "token_weights must be the same on all ranks"),
        (
            {"token_weights": torch.zeros(37)},
            "token_weights must be the same .* ranks of group",
        ),
        ({"weight": torch.zeros(30, 3)}, "weight must be \\(V, 12\\), got \\(30, 3\\)"),
        ({"labels": torch.full((37,), WORDS)}, "labels must be from 0 to 49 or ignore_index"),
        ({"labels": torch.full((37,), 7)}, "labels must be the same on all ranks of group"),
        ({"hidden": torch.zeros(37, 12)}, "weight must have hidden's dtype, torch.float32, got"),
        (
            {"hidden": torch.zeros(37, 12, dtype=torch.float64)},
            "hidden.requires_grad must be the same on all ranks",
        ),
    ],
)
def test_ranks_refuse_together_what_one_rank_refuses(change, said):
    for text in virtual(2, refused, change):
        assert text is not None and re.search(said, text), text
