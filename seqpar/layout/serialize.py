"""Turn cuts into integers and back, so that a tensor can hold one."""

from __future__ import annotations

from dataclasses import astuple
from typing import cast

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.layout.cuts.chunked import Chunked
from seqpar.layout.cuts.cuts import Contiguous, Spans, Striped, Zigzag
from seqpar.layout.cuts.even import EvenStripes, EvenZigzag

LayoutCut = Contiguous | Zigzag | Striped | Spans | EvenZigzag | EvenStripes | Chunked
# Append new kinds at the end: codes contain the index.
_KINDS = Contiguous, Zigzag, Striped, Spans, EvenZigzag, EvenStripes, Chunked


def encode(cut: LayoutCut) -> Ints:
    """Return integers that determine a cut: its kind, then its fields."""
    kind = _KINDS.index(type(cut))
    if isinstance(cut, Spans):
        return np.concatenate([[kind, cut.ranks], *astuple(cut)])
    if isinstance(cut, Chunked):
        whole = encode(cast(LayoutCut, cut.whole))
        return np.concatenate([[kind, cut.size, cut.documents.size], cut.documents, whole])
    return np.array([kind, *astuple(cut)], dtype=np.int64)


def decode(code: Ints) -> LayoutCut:
    kind = _KINDS[code[0]]
    if kind is Spans:
        edges, table = np.split(code[2:], [int(code[1]) + 1])
        return Spans(edges, *table.reshape(3, -1))
    if kind is Chunked:
        documents, whole = np.split(code[3:], [int(code[2])])
        return Chunked(decode(whole), documents, int(code[1]))
    return kind(*code[1:].tolist())
