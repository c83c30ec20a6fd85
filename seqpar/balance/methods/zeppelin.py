"""Zeppelin's hierarchical partitioning: long documents over nodes, then over a node's devices.

"Zeppelin: Balancing Variable-Length Workloads in Data Parallel Large Model Training" (2025),
section 4.1. Computation grows with the square of a document's length, and can hide more
communication for longer documents. By their lengths, documents are therefore divided into three
zones: long documents are spread over several nodes, shorter ones over the devices of one node, and
short ones are placed on one rank. The ranks that hold a document form a ring.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from seqpar.balance.methods.greedy import GreedyAssigner
from seqpar.balance.predict.batch import DocumentBatch, Pieces
from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up
from seqpar.costs.grid import Floats


def place(batch: DocumentBatch) -> Pieces:
    cluster, order = batch.costs.cluster, batch.longest_first
    nodes, devices = cluster.nodes, cluster.devices_per_node
    # A ring hides its messages if each rank holds `hidden_share` tokens of the document. The
    # smallest ring between nodes has two members.
    zone = 2 * devices * batch.hidden_share["between"]
    cluster_row, empty = np.zeros_like(order), np.zeros((2, 1, nodes))
    sizes, members = partition(batch, order, cluster_row, empty, zone, batch.capacity * devices)
    inter = sizes > 1
    owner = np.repeat(np.arange(order.size), sizes)
    of_inter = inter[owner]
    devices_of = (members[of_inter][:, None] * devices + np.arange(devices)).ravel()
    sizes = sizes[inter] * devices
    each = np.repeat(1 / sizes, sizes)
    parts = (np.repeat(x[order[inter]], sizes) * each for x in (batch.weights, batch.held))
    had = np.stack([np.bincount(devices_of, part, batch.ranks) for part in parts])
    buckets = had.astype(np.float64).reshape(2, nodes, devices)
    zone = 2 * batch.hidden_share["inside"]
    node = members[~of_inter]
    local_sizes, local = partition(batch, order[~inter], node, buckets, zone, batch.capacity)
    documents = np.r_[order[inter], order[~inter]]
    return _with_room(batch, documents, np.r_[sizes, local_sizes], np.r_[devices_of, local])


def partition(
    batch: DocumentBatch, documents: Ints, row: Ints, had: Floats, zone: float, capacity: int
) -> tuple[Ints, Ints]:
    """Place the documents of each row in the buckets of the row (Algorithms 1 and 2).

    A bucket is a node or a rank. In the first call, there is one row, whose buckets are all nodes
    of the cluster. In the second call, there is a row for each node, whose buckets are the ranks of
    the node.

    A document of at least `zone` tokens is cut over several buckets. The number of these buckets is
    the work of the document divided by the mean work of a bucket, rounded up. A shorter document is
    placed whole in the bucket with the least work. If a bucket would get more than `capacity`
    tokens, the longest documents are cut over all buckets of their row. `had` (2, rows, width)
    contains the work and the number of tokens that were placed in each bucket before.

    Returns the number of buckets of each document, and the indices of these buckets.
    """
    held, weights, width = batch.held[documents], batch.weights[documents], had.shape[2]
    mean = had[0].sum(1) + np.bincount(row, weights, had.shape[1])
    most = np.minimum(batch.most_ranks[documents], width)
    filled = np.ceil(weights * width / np.maximum(mean[row], 1e-30)).astype(np.int64)
    needed, dropped = np.ceil(held / capacity).astype(np.int64), 0
    # As long as a bucket has too many tokens, more of the longest documents are cut. The number of
    # cut documents at least doubles each time.
    while True:
        sizes = np.where(batch.lengths[documents] >= zone, filled, 1)
        sizes[:dropped] = np.maximum(sizes[:dropped], width)
        sizes = np.maximum(np.minimum(sizes, most), np.minimum(needed, width))
        members, tokens = _assign(held, weights, row, had, sizes)
        if (tokens <= capacity).all() or width == 1 or dropped >= documents.size:
            return sizes, members
        dropped = max(1, 2 * dropped, int(np.count_nonzero(sizes == width)))


def _assign(
    held: Floats, weights: Floats, row: Ints, had: Floats, sizes: Ints
) -> tuple[Ints, Floats]:
    """Place each document in the buckets of its row that have the least work. A bucket is a node or
    a rank. Documents that are cut over several buckets are placed first.
    """
    _, rows, width = had.shape
    work, tokens = had.copy()
    firsts = np.cumsum(sizes) - sizes
    members = np.empty(int(sizes.sum()), np.int64)
    for cut in (True, False):
        chosen = np.flatnonzero((sizes > 1) == cut)
        chosen = chosen[np.argsort(row[chosen], kind="stable")]
        count = np.bincount(row[chosen], minlength=rows)
        number = count_up(count)
        turn, column = (number, 0 * number) if cut else np.divmod(number, width)
        by_turn = np.argsort(turn, kind="stable")
        edges = np.searchsorted(turn[by_turn], np.arange(turn.max(initial=-1) + 2))
        for first, stop in pairwise(edges.tolist()):
            those = chosen[by_turn[first:stop]]
            places, size = column[by_turn[first:stop]], sizes[those]
            order = np.argsort(work, axis=1, kind="stable")
            document = np.repeat(those, size)
            each = count_up(size)
            bucket = order[row[document], np.repeat(places, size) + each] + row[document] * width
            members[firsts[document] + each] = bucket
            work.ravel()[bucket] += weights[document] / sizes[document]
            tokens.ravel()[bucket] += held[document] / sizes[document]
    return members, tokens


def _with_room(batch: DocumentBatch, documents: Ints, sizes: Ints, members: Ints) -> Pieces:
    owner = np.repeat(np.arange(documents.size), sizes)
    share = batch.ring_held(documents, sizes)
    by_rank = np.argsort(members, kind="stable")
    held = np.cumsum(share[owner[by_rank]])
    before = np.r_[0, held][np.searchsorted(members[by_rank], np.arange(batch.ranks))]
    over = held - before[members[by_rank]] > batch.capacity
    fits = np.ones(documents.size, bool)
    fits[owner[by_rank][over]] = False
    ranks = GreedyAssigner(batch)
    ranks.put(documents[fits], sizes[fits], members[fits[owner]])
    ranks.deal(batch.by_length(documents[~fits]))
    return ranks.pieces
