"""Predict the time of published baselines: even context parallelism, static DP × CP, and in order.

Costs are the same as for plans (`seqpar.costs`). The baselines follow the papers:

* An even split (Transformer Engine's context parallelism) cuts every document into 2G chunks, and
  pads it to a multiple of 2G. In each of G steps, a rank sends the keys and values of all documents
  to the next rank, whatever the mask. The step takes as long as its work or its message. The ring
  passes between nodes over one NIC of each. Keys return with their gradients.
* Static data × context parallelism packs documents in order into sequences of the context's length,
  and cuts each sequence in this way over the ranks of a group. Groups wait for each other at the
  end of a step.

Where the papers give no details, the baselines are favoured: merging of results, padding's memory,
launches beyond one per step, and the reduction of gradients take no time.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from seqpar import balance
from seqpar.balance.predict.batch import WAYS, DocumentBatch, Pieces
from seqpar.balance.predict.prediction import predict
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Tasks


def even_split(lengths: Ints, costs: balance.Costs, ranks: int, nics: int = 1) -> float:
    """Return the seconds of a step with all documents cut over `ranks` ranks.

    A message between nodes is divided among `nics` NICs (Zeppelin's routing).
    """
    chunk = np.ceil(lengths / (2 * ranks))
    tokens = 2 * float(chunk.sum())
    own = Tasks.of(2 * chunk, 2 * chunk, chunk * (2 * chunk + 1))
    # Both of a rank's chunks attend to the front chunk of an earlier rank. Only its back chunk
    # attends to the chunks of a later rank, to both of them.
    others = Tasks.of(2 * chunk, chunk, 2 * chunk**2), Tasks.of(chunk, 2 * chunk, 2 * chunk**2)
    seconds = 0.0
    for way in WAYS:
        first = float(costs.attention_call(own, backward=way)[0])
        each = max(float(costs.attention_call(x, backward=way)[0]) for x in others)
        hop = hop_seconds(costs, tokens, ranks, nics) * (2 if way else 1)
        attention = first
        if ranks > 1:
            attention = max(first, hop) + (ranks - 2) * max(each, hop) + each
        seconds += len(costs.model.layers) * attention + float(costs.tokenwise(tokens, way))
    return seconds


def hop_seconds(costs: balance.Costs, tokens: float, ranks: int, nics: int = 1) -> float:
    """Return the seconds to send the keys and values of these tokens to the next rank."""
    nbytes = costs.kv_bytes(tokens)
    inside = float(costs.cluster.inside.seconds(nbytes))
    if ranks <= costs.cluster.devices_per_node:
        return inside
    return max(inside, float(costs.message(nbytes, "between", nics=nics)))


def static(lengths: Ints, costs: balance.Costs, capacity: int, context: int) -> float:
    """Return the seconds of a step of static data × context parallelism."""
    group = -(-context // capacity)
    sequences = np.split(lengths, sequence_edges(lengths, context)[1:-1])
    seconds = [even_split(sequence, costs, group) for sequence in sequences]
    groups = costs.cluster.ranks // group
    return max(sum(seconds[first::groups]) for first in range(groups))


def sequence_edges(lengths: Ints, context: int) -> list[int]:
    """Return the edges of sequences that documents fill in order."""
    edges, room = [0], context
    for i, length in enumerate(lengths.tolist()):
        if length > room:
            edges.append(i)
            room = context
        room -= length
    return [*edges, lengths.size]


def in_order(lengths: Ints, costs: balance.Costs, capacity: int) -> float:
    """Return the seconds of a step with each document, in order, on the fewest ranks that hold it.

    This is ByteScale's data-aware sharding without its balance. A long document is cut over
    separate ranks; short documents fill a rank. The next micro-batch begins when all ranks are
    full. Ranks wait for each other at the end of the step.
    """
    ranks = costs.cluster.ranks
    batch = DocumentBatch.of(lengths, costs, capacity)
    firsts, place, room = [], -1, 0.0
    for size, held in zip(batch.least_ranks.tolist(), batch.held.tolist(), strict=True):
        if size > 1:
            place = max(place + 1, 0)
            place += -place % ranks if place % ranks + size > ranks else 0
            firsts.append(place)
            place, room = place + size - 1, 0.0
            continue
        if held > room:
            place, room = place + 1, float(capacity)
        room -= held
        firsts.append(place)
    turn, first = np.divmod(np.array(firsts), ranks)
    total = np.zeros(ranks)
    edges = np.searchsorted(turn, np.arange(turn[-1] + 2))
    for begin, end in pairwise(edges.tolist()):
        documents = np.arange(end - begin)
        part, sizes = batch.part(np.arange(begin, end)), batch.least_ranks[begin:end]
        members = np.concatenate(
            [np.arange(x, x + n) for x, n in zip(first[begin:end], sizes, strict=True)]
        )
        total += predict(part, Pieces.rings(part, documents, sizes, members)).seconds
    return float(total.max())
