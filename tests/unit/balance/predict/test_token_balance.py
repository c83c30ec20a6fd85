"""token_balanced: equally many tokens a rank, and what moves is what the linear program moves."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, balance
from seqpar.balance.predict.token_balance import moves
from tests.support.ranks import virtual


def cluster_of(nodes, devices, inside=4.0, between=1.0):
    cluster = balance.Cluster.preset(f"{nodes}x{devices}-h100")
    links = {"inside": inside, "between": between}
    changed = {
        name: dataclasses.replace(getattr(cluster, name), rate=x) for name, x in links.items()
    }
    return dataclasses.replace(cluster, **changed)


def seconds(tokens, found, cluster):
    """How long the rank sends that sends longest."""
    size, total = cluster.devices_per_node, np.zeros(len(tokens))
    for sender, receiver, count in found:
        link = cluster.inside if sender // size == receiver // size else cluster.between
        total[sender] += count / link.rate
    return total.max(initial=0.0)


def least_seconds(tokens, cluster):
    """The same of the best way, by trying how many tokens each rank sends inside its node."""
    size, ranks = cluster.devices_per_node, len(tokens)
    target = np.full(ranks, sum(tokens) // ranks)
    target[np.argsort(-np.array(tokens), kind="stable")[: sum(tokens) % ranks]] += 1
    surplus, room = np.maximum(tokens - target, 0), np.maximum(target - tokens, 0)
    worst = []
    for node in range(cluster.nodes):
        here = slice(node * size, (node + 1) * size)
        ways = itertools.product(*(range(s + 1) for s in surplus[here]))
        rates = cluster.inside.rate, cluster.between.rate
        worst.append(
            min(
                max(
                    a / rates[0] + (s - a) / rates[1]
                    for a, s in zip(way, surplus[here], strict=True)
                )
                for way in ways
                if sum(way) <= room[here].sum()
            )
        )
    return max(worst)


@given(st.lists(st.integers(0, 9), min_size=6, max_size=6), st.sampled_from([4.0, 1.5, 1.0]))
def test_the_longest_sender_is_as_short_as_possible(tokens, inside):
    cluster = cluster_of(2, 3, inside)
    found = moves(np.array(tokens), cluster)
    np.testing.assert_allclose(seconds(tokens, found, cluster), least_seconds(tokens, cluster))
    after = np.array(tokens)
    for sender, receiver, count in found:
        assert count > 0
        after[sender] -= count
        after[receiver] += count
    assert after.max() - after.min() <= 1
    total = sum(tokens)
    least = np.maximum(np.sort(tokens)[::-1] - (total // 6 + (np.arange(6) < total % 6)), 0).sum()
    assert found[:, 2].sum() == least


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 2**32))
def test_every_token_is_held_once_and_most_stay(lengths, seed):
    cu, rng = np.r_[0, np.cumsum(lengths)], np.random.default_rng(seed)
    spans = [[] for _ in range(4)]
    for document, length in enumerate(lengths):
        cut = int(rng.integers(0, length + 1))
        for part in ((document, 0, cut), (document, cut, length)):
            spans[rng.integers(0, 4)].append(part)
    layout = Layout.from_spans(spans, cu)
    balanced = balance.token_balanced(layout, cluster_of(2, 2))
    held = [set(balanced.token_indices(rank).tolist()) for rank in range(4)]
    assert set().union(*held) == set(range(int(cu[-1])))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for rank in range(4):
        before = layout.token_indices(rank).tolist()
        assert held[rank] & set(before) >= set(before[: len(held[rank])])


def test_tokens_reach_the_balanced_layout_and_return():
    cluster = cluster_of(2, 2)
    layout = Layout.from_spans([[(0, 0, 30)], [(1, 0, 4)], [(2, 0, 3)], []], [0, 30, 34, 37])
    balanced = balance.token_balanced(layout, cluster)

    def program(comm):
        x = layout.shard(torch.arange(37.0), comm.rank)
        there = layout.remap(x, balanced, comm)
        assert torch.equal(balanced.remap(there, layout, comm), x)
        return len(there)

    assert virtual(4, program) == [10, 9, 9, 9]


def test_many_ranks_take_no_table_of_pairs():
    tokens = np.random.default_rng(0).integers(0, 10**6, 4096)
    found = moves(tokens, cluster_of(512, 8))
    assert len(found) < 3 * 4096


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="cluster must have the layout's 2 ranks, got one with 4"):
        balance.token_balanced(Layout.zigzag(8, 2), cluster_of(2, 2))
    with pytest.raises(ValueError, match=r"layout must be a seqpar.Layout"):
        balance.token_balanced([3, 4], cluster_of(1, 2))
