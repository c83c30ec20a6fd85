"""WLB-LLM: longest document first, to the lightest rank.

Wang et al., "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training" (2025),
section 4, but outliers are not deferred. Only documents longer than a rank's capacity are cut.
"""

from __future__ import annotations

from seqpar.balance.methods.greedy import GreedyAssigner
from seqpar.balance.predict.batch import DocumentBatch, Pieces


def place(batch: DocumentBatch) -> Pieces:
    """Give each document to the rank that has the least work, if it has room."""
    ranks, order = GreedyAssigner(batch), batch.longest_first
    ranks.deal(order, batch.least_ranks[order])
    return ranks.pieces
