"""Zigzag for all: cut every document over all ranks, as usual in context parallelism."""

from __future__ import annotations

import numpy as np

from seqpar.balance.predict.batch import DocumentBatch, Pieces
from seqpar.balance.predict.prediction import (
    DocumentShares,
    Prediction,
    predict,
    seconds_of,
    summed,
    work_of,
)
from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats
from seqpar.layout.cuts.even import EvenZigzag


def place(batch: DocumentBatch) -> tuple[EvenZigzag, Prediction]:
    """Cut every document into 2P chunks, and predict the ranks.

    Pieces are not listed: there would be documents × ranks of them. The first and the last rank are
    predicted, and the other ranks, which differ little, are interpolated.
    """
    cut, ranks = EvenZigzag(batch.ranks), batch.ranks
    if ranks == 1:  # one span per document instead of two that touch
        documents = np.arange(batch.lengths.size)
        here = np.zeros_like(documents)
        return cut, predict(batch, Pieces(documents, here, here, batch.lengths))
    cu = np.r_[0, np.cumsum(batch.lengths)]
    tokens = cut.counts(cu).tokens
    ends = [seconds_of(batch, _shares(batch, cut, cu, r), tokens) for r in (0, ranks - 1)]
    pairs = (ends[0].seconds, ends[1].seconds), (ends[0].bytes, ends[1].bytes)
    seconds, sent = (np.linspace(float(x[0]), float(y[-1]), ranks) for x, y in pairs)
    return cut, Prediction(seconds, tokens, sent, ends[0].offload)


def _shares(batch: DocumentBatch, cut: EvenZigzag, cu: Ints, rank: int) -> DocumentShares:
    """Return the rank's shares of the documents of which it has any tokens."""
    held, starts, stops = cut.columns(cu, rank)
    pieces = Pieces(held, np.full_like(held, rank), starts, stops)
    documents, share = np.unique(pieces.documents, return_inverse=True)

    def total(values: Floats | Ints) -> Floats:
        return summed(share, values, documents.size)

    length = pieces.stops - pieces.starts
    own, last = total(length), np.zeros(documents.size)
    np.maximum.at(last, share, pieces.stops)
    sizes = np.minimum(batch.lengths[documents], batch.ranks)
    # The low chunk goes to all other ranks. The high chunk goes to the ranks before this one: their
    # own high chunks come after it.
    high = 2 * pieces.starts >= batch.lengths[pieces.documents]
    readers = np.where(high, np.minimum(rank, sizes[share] - 1), sizes[share] - 1)
    seen: dict[int | None, Floats] = {None: last - own}
    sent: dict[int | None, Floats] = {None: total(length * readers)}
    for window in batch.windows:
        seen[window] = np.minimum(total(np.minimum(pieces.starts, window - 1)), last - own)
        sent[window] = np.minimum(total(np.minimum(length, window - 1)), sent[None])
    work = np.stack([total(x) for x in work_of(batch, pieces)])
    devices = batch.costs.cluster.devices_per_node
    beside = np.minimum(sizes, devices)
    return DocumentShares(
        np.full(documents.size, rank), sizes, beside, own.astype(np.int64), seen, sent, work
    )
