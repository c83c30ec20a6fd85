"""ByteScale's hybrid data parallelism: a document on any number of ranks of one global group.

Ge et al., "ByteScale: Efficient Scaling of LLM Training with a 2048K Context Length on More Than
12,000 GPUs" (2025), sections 4 and 5. Work determines the number of ranks of a long document.
"""

from __future__ import annotations

from seqpar.balance.methods.greedy import GreedyAssigner
from seqpar.balance.predict.batch import DocumentBatch, Pieces


def place(batch: DocumentBatch, part: float = 1.0) -> Pieces:
    """Cut each document according to its work, and give the parts to the lightest ranks.

    No rank gets more seconds of a document than `part` of the mean, as far as parts of at least
    `MIN_SHARE_TOKENS` tokens allow. Small parts balance tokens and work together.
    """
    ranks, order = GreedyAssigner(batch), batch.longest_first
    ranks.deal(order, batch.shares_of(batch.mean * part)[order])
    return ranks.pieces
