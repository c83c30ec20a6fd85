"""Power-of-two groups: Megatron's dynamic context parallelism.

In Megatron Core (`default_dynamic_cp`) the number of ranks of a document is rounded up to a power
of two, and the ranks are an aligned block, because communicators are created once for such blocks.
"""

from __future__ import annotations

import numpy as np

from seqpar.balance.methods.greedy import GreedyAssigner
from seqpar.balance.predict.batch import DocumentBatch, Pieces


def place(batch: DocumentBatch) -> Pieces:
    """Give each document, longest first, to the lightest aligned block of a power of two of ranks.

    A block's size follows from the share of all work and from the tokens. Documents that no block
    has room for are cut to fit the remaining room.
    """
    ranks, order = GreedyAssigner(batch), batch.longest_first
    wanted = 2 ** np.ceil(np.log2(batch.shares_of(batch.mean))).astype(np.int64)
    sizes = np.minimum(wanted, 2 ** int(np.log2(batch.ranks)))
    late = []
    for document in order[sizes[order] > 1].tolist():
        size = int(sizes[document])
        blocks = batch.ranks // size
        load = ranks.load[: blocks * size].reshape(blocks, size)
        # a rank's two chunks may each have one token more than others
        share = (-(-int(batch.lengths[document]) // size) + 2) * batch.kept[document]
        room = batch.capacity - ranks.held[: blocks * size].reshape(blocks, size).max(1)
        open_blocks = np.flatnonzero(room >= share)
        if not open_blocks.size:
            late.append(document)
            continue
        block = int(open_blocks[np.argmin(load[open_blocks].max(1))])
        members = np.arange(block * size, (block + 1) * size)
        ranks.put(np.array([document]), np.array([size]), members)
    ranks.deal(np.array(late, np.int64))
    ranks.deal(order[sizes[order] == 1])
    return ranks.pieces
