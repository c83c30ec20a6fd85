"""place_homes: layouts whose attention is even before anything moves, for few keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.balance.documents import draw
from seqpar import balance
from seqpar.balance import RowBytes
from seqpar.costs.grid import causal_pairs

ROWS = RowBytes.of(32, 8, 128)


def figures(layout):
    """Each rank's causal pairs, tokens, and keys of other ranks that its queries see."""
    found = []
    for rank in range(layout.ranks):
        pairs = keys = 0
        last = {}
        for document, start, stop in layout.spans(rank):
            pairs += float(causal_pairs(start, stop))
            keys -= stop - start
            last[document] = stop
        found.append((pairs, layout.tokens_on(rank), keys + sum(last.values())))
    return np.array(found).T


@given(st.lists(st.integers(0, 400), max_size=9), st.integers(1, 9), st.sampled_from([1, 8, 128]))
def test_every_token_has_a_home(lengths, ranks, tile):
    layout = balance.place_homes(lengths, ranks, row_bytes=ROWS, tile=tile)
    assert layout.ranks == ranks
    assert layout.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
    held = np.concatenate([layout.token_indices(rank).numpy() for rank in range(ranks)])
    assert np.array_equal(np.sort(held), np.arange(sum(lengths)))
    for rank in range(ranks):  # only at multiples of a tile are documents cut
        assert all(span.start % tile == 0 for span in layout.spans(rank))


@pytest.mark.parametrize("seed", range(3))
def test_work_memory_and_tokens_are_even(seed):
    tokens, ranks = 2**19, 32
    lengths = draw("pretrain", ranks * tokens, tokens, seed)
    layout = balance.place_homes(lengths, ranks, row_bytes=ROWS)
    pairs, held, keys = figures(layout)
    used = held * sum(ROWS) + keys * ROWS.key
    for amount, most in ((pairs, 1.05), (held, 1.05), (used, 1.05)):
        assert amount.max() <= most * amount.mean()
    # The bound of homes that are packed in order, in the notes on which the target rests.
    assert keys.mean() * ROWS.key < 1476 * 2**20


def test_documents_that_fit_are_not_cut():
    lengths = [1000] * 30 + [64] * 100
    layout = balance.place_homes(lengths, 10, row_bytes=ROWS, tile=1)
    _, held, keys = figures(layout)
    assert keys.sum() <= 64 * 10 and held.max() - held.min() <= 1


def test_ranks_with_many_keys_get_fewer_tokens():
    lengths = [60000] + [600] * 900
    for token_bytes, fewer in ((None, True), (1e9, False)):
        layout = balance.place_homes(lengths, 8, row_bytes=ROWS, token_bytes=token_bytes)
        _, held, keys = figures(layout)
        used = held * (token_bytes or sum(ROWS)) + keys * ROWS.key
        assert used.max() <= 1.05 * used.mean()
        assert (held.max() > 1.005 * held.mean()) == fewer


WRONG = {
    "ranks must be at least 1, got 0": {"ranks": 0},
    "lengths must not be negative, got -1": {"lengths": [3, -1]},
    "lengths must each be below 2\\*\\*31 tokens, got 4000000000": {"lengths": [4 * 10**9]},
    "tolerance must be at least 0 and finite, got -0.5": {"tolerance": -0.5},
    "token_bytes must be positive and finite, got 0.0": {"token_bytes": 0},
    "tolerance must be at least 0 and finite, got inf": {"tolerance": float("inf")},
    "token_bytes must be positive and finite, got inf": {"token_bytes": float("inf")},
    "tile must be at least 1, got 0": {"tile": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    arguments = {"lengths": [5, 7], "ranks": 2, "row_bytes": ROWS} | WRONG[message]
    with pytest.raises(ValueError, match=message):
        balance.place_homes(**arguments)
