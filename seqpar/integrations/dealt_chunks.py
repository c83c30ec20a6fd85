"""Layouts of tokens that a framework deals to ranks in chunks, whatever documents they hold."""

from __future__ import annotations

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.layout.layout import Layout


def head_and_tail(ranks: int) -> Ints:
    """Return the owners of 2P chunks of which rank r holds chunks r and 2P − 1 − r."""
    return np.r_[np.arange(ranks), np.arange(ranks)[::-1]]


def layout_of_chunks(chunks: Ints, owners: Ints, ranks: int, cu_seqlens: Ints) -> Layout:
    """Return the layout in which chunk i is on rank `owners[i % len(owners)]`.

    Args:
        chunks: (chunks + 1,) where chunks begin among all tokens, followed by the number of tokens.
        owners: the ranks of the first chunks. The following chunks have the same ranks again.
        ranks: the number of ranks.
        cu_seqlens: (documents + 1,) where documents begin, followed by the number of tokens.
    """
    cuts = np.union1d(chunks, cu_seqlens)
    begins, ends = cuts[:-1], cuts[1:]
    owner = owners[(np.searchsorted(chunks, begins, side="right") - 1) % owners.size]
    number = np.searchsorted(cu_seqlens, begins, side="right") - 1
    spans = np.stack([number, begins - cu_seqlens[number], ends - cu_seqlens[number]], 1)
    return Layout.from_spans([spans[owner == rank].tolist() for rank in range(ranks)], cu_seqlens)
