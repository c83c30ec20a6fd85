"""ByteScale's hybrid data parallelism: any number of ranks a document, in one global group.

Ge et al., "ByteScale: Efficient Scaling of LLM Training with a 2048K Context Length on More Than
12,000 GPUs" (2025), sections 4 and 5: a long document gets as many ranks as its work needs, be they
a power of two or not; documents are then assigned, longest first, to the ranks with time left.
"""

from __future__ import annotations

from seqpar.balance.methods.greedy import GreedyAssigner
from seqpar.balance.predict.batch import DocumentBatch, Pieces


def place(batch: DocumentBatch, part: float = 1.0) -> Pieces:
    """Give each document to as many of the lightest ranks as its work needs.

    None of them has more seconds of it than `part` of the mean. With small parts ranks get some of
    many long documents each, so they balance tokens and work at once.
    """
    ranks, order = GreedyAssigner(batch), batch.longest_first
    ranks.deal(order, batch.shares_of(batch.mean * part)[order])
    return ranks.pieces
