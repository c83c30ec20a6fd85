"""Local search: it moves whole documents, keeps the capacity, and never makes a step slower."""

import numpy as np
import pytest

from seqpar import balance
from seqpar.balance.planning.local_search import refine
from seqpar.balance.predict.batch import DocumentBatch, Pieces
from seqpar.balance.predict.prediction import predict

COSTS = balance.Costs(balance.Cluster.preset("1x4-h100"), balance.Model.preset("llama-8b"))


def whole(lengths, ranks):
    """Each document whole on a rank."""
    documents = np.arange(len(lengths))
    return Pieces(documents, np.array(ranks), 0 * documents, np.array(lengths))


@pytest.mark.parametrize(
    ("lengths", "ranks", "expected"),
    [
        ([5000] * 4, [0, 0, 0, 0], [1, 1, 1, 1]),  # moves
        ([9000, 1000, 5000, 5000], [0, 0, 1, 2], None),
        ([7000, 7000, 4000, 4000, 7000, 4000, 7000, 4000], [0, 0, 1, 1, 2, 2, 3, 3], [2] * 4),
    ],
)
def test_documents_move_and_swap_until_ranks_are_even(lengths, ranks, expected):
    batch, pieces = DocumentBatch.of(np.array(lengths), COSTS, 20000), whole(lengths, ranks)
    before = predict(batch, pieces)
    after = refine(batch, pieces, before)[0]
    assert predict(batch, after).seconds.max() < before.seconds.max()
    if expected is not None:
        assert np.bincount(after.ranks, minlength=4).tolist() == expected
        assert len({*np.bincount(after.ranks, np.array(lengths), 4).tolist()}) == 1


def test_a_full_rank_gets_no_document():
    lengths = [6000, 6000, 3000, 3000, 3000, 3000, 3000, 3000]
    batch = DocumentBatch.of(np.array(lengths), COSTS, 12000)
    pieces = whole(lengths, [0, 0, 1, 1, 1, 1, 2, 3])
    after = refine(batch, pieces, predict(batch, pieces))[0]
    tokens = np.bincount(after.ranks, np.array(lengths), 4)
    assert tokens.max() <= 12000 and tokens.sum() == sum(lengths)


@pytest.mark.parametrize("seed", range(5))
def test_no_step_makes_the_slowest_rank_slower(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(7, 1.5, 60).astype(int).clip(1)
    batch = DocumentBatch.of(lengths, COSTS, int(lengths.sum()))
    pieces = whole(lengths, rng.integers(0, 4, 60))
    before = predict(batch, pieces)
    after = refine(batch, pieces, before)[1]
    assert after.seconds.max() <= before.seconds.max() * (1 + 1e-12)
