"""Contiguous packing: documents in their order, cut where a rank's share of the tokens ends.

A loader that concatenates documents and cuts them into equal sequences packs in this way.
"""

from __future__ import annotations

import numpy as np

from seqpar.balance.predict.batch import DocumentBatch, Pieces
from seqpar.layout.cuts.cuts import Contiguous


def place(batch: DocumentBatch) -> Pieces:
    """Give rank c tokens ⌊cT/P⌋ … ⌊(c+1)T/P⌋ − 1 of the batch."""
    cut = Contiguous(batch.ranks)
    edges, (documents, starts, stops) = cut.table(np.r_[0, np.cumsum(batch.lengths)])
    return Pieces(documents, np.repeat(np.arange(batch.ranks), np.diff(edges)), starts, stops)
