"""Levelling: shares of cut documents move between the ranks that have some, to the token."""

import numpy as np
import pytest

from seqpar import balance
from seqpar.balance.planning.local_search import level
from seqpar.balance.predict.batch import MIN_SHARE_TOKENS, DocumentBatch, Pieces
from seqpar.balance.predict.prediction import predict
from tests.support.tiers import few_rows

COSTS = balance.Costs(balance.Cluster.preset("1x4-h100"), balance.Model.preset("llama-8b"))


def placed(lengths, rings, capacity):
    """The batch, and each document on a ring of these ranks."""
    batch = DocumentBatch.of(np.array(lengths), COSTS, capacity)
    sizes = np.array([len(ring) for ring in rings])
    return batch, Pieces.rings(batch, np.arange(sizes.size), sizes, np.concatenate(rings))


def tokens_of(batch, pieces):
    return np.bincount(pieces.ranks, pieces.stops - pieces.starts, batch.ranks)


def assert_covered(batch, pieces):
    """Each document's pieces are all of its tokens once."""
    order = np.lexsort((pieces.starts, pieces.documents))
    document, start, stop = (x[order] for x in (pieces.documents, pieces.starts, pieces.stops))
    first = np.diff(document, prepend=-1) != 0
    assert (start[first] == 0).all() and (start[~first] == stop[:-1][~first[1:]]).all()
    assert (stop[np.r_[first[1:], True]] == batch.lengths[document[first]]).all()


def test_shared_documents_even_out_their_ranks():
    """Ranks 0 and 3 have a whole document more; the two rings give them less, and are linked."""
    batch, pieces = placed(
        [40000, 40000, 8000, 8000], [[0, 1, 2], [1, 2, 3], [0], [3]], capacity=10**6
    )
    before = predict(batch, pieces)
    after = level(batch, pieces, before)
    assert_covered(batch, after)
    seconds = predict(batch, after).seconds
    assert before.seconds.max() > 1.1 * before.seconds.mean()
    assert seconds.max() < 1.005 * seconds.mean()
    whole = after.whole(batch)
    assert sorted(after.documents[whole].tolist()) == [2, 3]
    # Chunks are whole tiles, but where the front meets the back.
    sizes = (after.stops - after.starts)[~whole]
    assert np.count_nonzero(sizes % MIN_SHARE_TOKENS) <= 4


def test_a_rank_gets_at_most_its_room():
    lengths, rings = [40000, 8000], [[0, 1], [0]]
    roomy, tight = (placed(lengths, rings, capacity) for capacity in (10**6, 28000))
    most = []
    for batch, pieces in (roomy, tight):
        after = level(batch, pieces, predict(batch, pieces))
        assert_covered(batch, after)
        most.append(int(tokens_of(batch, after).max()))
    assert most[1] <= 28000
    full = placed(lengths, rings, 28000)[0]
    assert tokens_of(full, level(*tight, predict(*tight)))[1] <= 28000


@pytest.mark.parametrize("ring", [[0, 1], [1, 0], [1, 0, 2], [3, 1, 2, 0]])
def test_a_rank_keeps_a_whole_tile_or_nothing(ring):
    batch, pieces = placed([40001, 200000], [ring, [0]], capacity=10**6)
    after = level(batch, pieces, predict(batch, pieces))
    assert_covered(batch, after)
    of_first = after.documents == 0
    tokens = np.bincount(after.ranks[of_first], (after.stops - after.starts)[of_first], 4)
    assert tokens[0] <= 512 and (tokens[tokens > 0] >= MIN_SHARE_TOKENS).all()


def test_whole_documents_stay():
    batch, pieces = placed([500, 900], [[0], [1]], capacity=2000)
    assert level(batch, pieces, predict(batch, pieces)) is pieces


@few_rows()
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slack", [1.0, 1.2])
def test_any_cuts_are_covered_and_within_capacity(seed, slack):
    """Also those of documents that were cut as room was left, on ranks that are full."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(8, 2, 12).astype(int).clip(1)
    capacity = int(slack * lengths.sum() / 4) + 1
    batch = DocumentBatch.of(lengths, COSTS, capacity)
    from seqpar.balance.methods.greedy import bytescale

    pieces = bytescale(batch, part=rng.choice([1.0, 0.25, 0.0]))
    after = level(batch, pieces, predict(batch, pieces))
    assert_covered(batch, after)
    assert tokens_of(batch, after).max() <= capacity
