"""Contiguous packing: documents in their order, cut where a rank's share of the tokens ends.

That is what a loader does which concatenates documents and cuts the row into equal sequences.
"""

from __future__ import annotations

import numpy as np

from seqpar.balance.batch import Batch, Pieces


def place(batch: Batch) -> Pieces:
    """Give rank c tokens ⌊cT/P⌋ … ⌊(c+1)T/P⌋ − 1 of the batch."""
    cu = np.r_[0, np.cumsum(batch.lengths)]
    cuts = int(cu[-1]) * np.arange(batch.ranks + 1) // batch.ranks
    edges = np.unique(np.r_[cu, cuts])
    documents = np.searchsorted(cu, edges[:-1], side="right") - 1
    ranks = np.searchsorted(cuts, edges[:-1], side="right") - 1
    return Pieces(documents, ranks, edges[:-1] - cu[documents], edges[1:] - cu[documents])
