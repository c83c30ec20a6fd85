"""Baselines that do not balance work: contiguous packing, and zigzag for all documents."""

from __future__ import annotations

import numpy as np

from seqpar.balance.predict.batch import DocumentBatch, Pieces
from seqpar.balance.predict.prediction import (
    DocumentShares,
    Prediction,
    keys_and_work,
    predict,
    seconds_of,
    share_ends,
)
from seqpar.core.arguments import Ints
from seqpar.layout.cuts.contiguous import Contiguous
from seqpar.layout.cuts.zigzag import EvenZigzag


def contiguous(batch: DocumentBatch) -> Pieces:
    """Cut the T tokens of the batch into P equal parts. Rank c holds tokens ⌊cT/P⌋ … ⌊(c+1)T/P⌋ −
    1.

    Loaders that concatenate documents and cut the result into equal sequences do the same.
    """
    edges, (documents, starts, stops) = Contiguous(batch.ranks).table(_cu_seqlens(batch))
    return Pieces(documents, np.repeat(np.arange(batch.ranks), np.diff(edges)), starts, stops)


def zigzag(batch: DocumentBatch) -> tuple[EvenZigzag, Prediction]:
    """Cut every document into 2P chunks, of which each of the P ranks holds two, as usual in
    context parallelism.
    """
    cut, ranks = EvenZigzag(batch.ranks), batch.ranks
    if ranks == 1:  # one span per document, instead of two adjacent spans
        documents = np.arange(batch.lengths.size)
        here = np.zeros_like(documents)
        return cut, predict(batch, Pieces(documents, here, here, batch.lengths))
    cu = _cu_seqlens(batch)
    tokens = cut.counts(cu).tokens
    # Pieces are not listed, because their number would be documents × ranks. The ranks differ
    # little, so only the first and the last rank are predicted, and the others are interpolated.
    ends = [seconds_of(batch, _shares(batch, cut, cu, r), tokens) for r in (0, ranks - 1)]
    pairs = (ends[0].seconds, ends[1].seconds), (ends[0].bytes, ends[1].bytes)
    seconds, sent = (np.linspace(float(x[0]), float(y[-1]), ranks) for x, y in pairs)
    return cut, Prediction(seconds, tokens, sent, ends[0].offload)


def _shares(batch: DocumentBatch, cut: EvenZigzag, cu: Ints, rank: int) -> DocumentShares:
    held, starts, stops = cut.columns(cu, rank)
    pieces = Pieces(held, np.full_like(held, rank), starts, stops)
    documents, share = np.unique(held, return_inverse=True)
    sizes = np.minimum(batch.lengths[documents], batch.ranks)
    beside = np.minimum(sizes, batch.costs.cluster.devices_per_node)
    # The keys of a rank's low chunk are sent to all other ranks. The keys of its high chunk are
    # sent only to lower ranks, because their high chunks come later in the document.
    high = 2 * starts >= batch.lengths[held]
    readers = np.where(high, np.minimum(rank, sizes[share] - 1), sizes[share] - 1)
    ends = share_ends(share, pieces, documents.size)
    counted = keys_and_work(batch, pieces, share, ends, readers, np.ones(held.size, bool))
    return DocumentShares(np.full_like(documents, rank), sizes, beside, *counted)


def _cu_seqlens(batch: DocumentBatch) -> Ints:
    return np.r_[0, np.cumsum(batch.lengths)]
