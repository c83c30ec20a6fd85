"""Baselines of published figures, against what they say by hand."""

import numpy as np
import pytest

from benchmarks.balance.baselines import even_split, hop_seconds, in_order, sequence_edges, static
from benchmarks.balance.documents import draw
from seqpar import balance
from seqpar.costs.grid import Tasks

MODEL = balance.Model.preset("llama-7b")
COSTS = balance.Costs(balance.Cluster.preset("2x8-a800"), MODEL)


def seconds_alone(lengths):
    """A rank's seconds with whole documents."""
    tokens = int(np.sum(lengths))
    return sum(
        float(COSTS.span_seconds(np.zeros_like(lengths), lengths, backward=way)[0])
        + float(COSTS.tokenwise(tokens, way))
        for way in (False, True)
    )


def test_an_even_split_over_one_rank_sends_nothing():
    lengths = np.array([4096, 2048, 512])
    assert even_split(lengths, COSTS, 1) == pytest.approx(seconds_alone(lengths), rel=1e-3)


def test_a_ring_waits_for_its_slowest_link():
    """4K tokens a rank, as in Zeppelin: messages between nodes take longer than any step's work."""
    tokens, ranks = 4096, 16
    lengths = np.full(64, tokens * ranks // 64)
    forward = hop_seconds(COSTS, tokens, ranks)
    assert forward == pytest.approx(20e-6 + float(COSTS.kv_bytes(tokens)) / (0.9 * 25e9))
    found = even_split(lengths, COSTS, ranks)
    linear = sum(float(COSTS.tokenwise(tokens, way)) for way in (False, True))
    hops = len(MODEL.layers) * (ranks - 1) * 3 * forward  # backward sends gradients too
    # The last step's work has no message beside it.
    chunk = np.full(64, lengths[0] / (2 * ranks))
    rows = Tasks.of(2 * chunk, chunk, 2 * chunk**2), Tasks.of(chunk, 2 * chunk, 2 * chunk**2)
    last = sum(
        max(float(COSTS.attention_call(x, backward=way)[0]) for x in rows) for way in (False, True)
    )
    assert found == pytest.approx(linear + hops + len(MODEL.layers) * last, rel=1e-9)
    assert even_split(lengths, COSTS, ranks, nics=4) < found / 1.5


def test_documents_are_padded_to_twice_the_ranks():
    one, two = (even_split(np.full(1000, length), COSTS, 8) for length in (16, 1))
    assert one == two


def test_sequences_are_filled_in_order():
    assert sequence_edges(np.array([5, 4, 3, 9, 1]), 10) == [0, 2, 3, 5]
    lengths = np.full(8, 16384)  # two sequences of 65536 tokens, over 8 ranks each
    both = static(lengths, COSTS, capacity=8192, context=65536)
    assert both == pytest.approx(even_split(lengths[:4], COSTS, 8))


def test_documents_in_order_use_the_fewest_ranks():
    """Where all fit on a rank each, the longest one's rank takes longest."""
    lengths = np.array([8000, 100, 200, 7000, 8192])
    alone = max(seconds_alone(lengths[[i]]) for i in range(5))
    assert in_order(lengths, COSTS, 8192) == pytest.approx(alone, rel=0.05)
    many = np.full(32, 8192)  # two micro-batches, one after the other
    assert in_order(many, COSTS, 8192) == pytest.approx(2 * seconds_alone(many[:1]), rel=0.02)


@pytest.mark.parametrize("name", ["byted", "github"])
def test_drawn_documents_have_the_published_shares(name):
    """ByteScale: four fifths of its documents have up to 4K tokens, 1% 128K and more."""
    lengths = draw(name, 2**28, 2**21)
    of_tokens = [lengths[lengths > edge].sum() / lengths.sum() for edge in (2**17, 2**18)]
    assert (lengths <= 4096).mean() == pytest.approx(0.8, abs=0.02)
    if name == "byted":
        assert (lengths > 2**17).mean() == pytest.approx(0.01, abs=0.004)
        assert lengths[lengths <= 2**16].sum() / lengths.sum() == pytest.approx(0.557, abs=0.03)
    else:
        assert of_tokens == pytest.approx([0.162, 0.098], abs=0.02)
