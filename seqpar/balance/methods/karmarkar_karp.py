"""Karmarkar–Karp: the largest differencing method, with one set per rank.

Karmarkar, Karp, "The Differencing Method of Set Partitioning" (1982). Trainers for reinforcement
learning use it to balance lengths. It takes P·log P steps per document, so it suits few ranks.
"""

from __future__ import annotations

import heapq

import numpy as np

from seqpar.balance.methods.greedy import GreedyAssigner
from seqpar.balance.predict.batch import DocumentBatch, Pieces
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats


def place(batch: DocumentBatch) -> Pieces:
    """Partition the documents into sets of nearly equal work, one per rank.

    Documents longer than a rank's capacity are first cut over the fewest ranks. The sets with the
    most work then go to the lightest ranks, and documents that do not fit go to others.
    """
    ranks, order = GreedyAssigner(batch), batch.longest_first
    cut = batch.least_ranks[order] > 1
    ranks.deal(order[cut], batch.least_ranks[order[cut]])
    late = []
    sets = partition(batch.weights[order[~cut]], batch.ranks)
    for rank, chosen in zip(np.argsort(ranks.seconds, kind="stable"), sets, strict=True):
        documents = order[~cut][chosen]
        room = batch.capacity - ranks.held[rank]
        fits = np.cumsum(batch.held[documents]) <= room
        late.append(documents[~fits])
        held = documents[fits]
        ranks.put(held, np.ones_like(held), np.full_like(held, rank))
    ranks.deal(batch.by_length(np.concatenate(late)))
    return ranks.pieces


def partition(weights: Floats, ranks: int) -> list[Ints]:
    """Return the indices of `ranks` sets of nearly equal weight, the heaviest set first.

    Each step merges the two partial solutions (lists of sets) whose heaviest and lightest sets
    differ most: the heaviest sets of one with the lightest sets of the other.
    """
    empty: list[list[int]] = [[] for _ in range(ranks)]
    heap: list[tuple[float, int, Floats, list[list[int]]]] = []
    for i, weight in enumerate(weights.tolist()):
        sums = np.r_[weight, np.zeros(ranks - 1)]
        heap.append((-weight, i, sums, [[i], *empty[1:]]))
    if not heap:
        return [np.zeros(0, np.int64)] * ranks
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one, of_one = heapq.heappop(heap)
        _, _, two, of_two = heapq.heappop(heap)
        sums = one + two[::-1]
        order = np.argsort(-sums, kind="stable")
        sets = [a + b for a, b in zip(of_one, reversed(of_two), strict=True)]
        sums, sets = sums[order], [sets[i] for i in order]
        heapq.heappush(heap, (float(sums[-1] - sums[0]), number, sums, sets))
        number += 1
    return [np.array(chosen, np.int64) for chosen in heap[0][3]]
