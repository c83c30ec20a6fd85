"""Layouts of tokens that a framework assigns to ranks in chunks, without regard to documents."""

from __future__ import annotations

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.layout.layout import Layout


def head_and_tail(ranks: int) -> Ints:
    """Return the ranks (2P,) of 2P chunks. Rank r holds chunks r and 2P − 1 − r."""
    return np.r_[np.arange(ranks), np.arange(ranks)[::-1]]


def layout_of_chunks(chunks: Ints, owners: Ints, ranks: int, cu_seqlens: Ints) -> Layout:
    """Return the layout in which chunk i is on rank `owners[i % len(owners)]`.

    Args:
        chunks: (number of chunks + 1,) integers. Entry i is the index of the first token of chunk
            i. The last entry is the number of all tokens.
        owners: a list of ranks. Entry i is the rank of chunk i. If there are more chunks than
            entries, the list is repeated from its start.
        ranks: the number of ranks.
        cu_seqlens: (number of documents + 1,) integers. Entry i is the index of the first token of
            document i. The last entry is the number of all tokens.
    """
    cuts = np.union1d(chunks, cu_seqlens)
    begins, ends = cuts[:-1], cuts[1:]
    owner = owners[(np.searchsorted(chunks, begins, side="right") - 1) % owners.size]
    number = np.searchsorted(cu_seqlens, begins, side="right") - 1
    spans = np.stack([number, begins - cu_seqlens[number], ends - cu_seqlens[number]], 1)
    return Layout.from_spans([spans[owner == rank].tolist() for rank in range(ranks)], cu_seqlens)
