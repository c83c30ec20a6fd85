"""Masks of 25 kinds in the form of MagiAttention's tables.

A table has slices, and a slice is (range of queries, range of keys, type of mask).
"""

import itertools

import numpy as np

TOKENS = 768
_HALF, _QUARTER, _EIGHTH = TOKENS // 2, TOKENS // 4, TOKENS // 8
_LENGTHS = (100, 28, 256, 64, 192, 128)
_EDGES = np.r_[0, np.cumsum(_LENGTHS)].tolist()
DOCUMENTS = list(itertools.pairwise(_EDGES))
EIGHTHS = [(first, first + _EIGHTH) for first in range(0, TOKENS, _EIGHTH)]
ALL = [(0, TOKENS)]
FULL, CAUSAL, INVCAUSAL, BICAUSAL = "full", "causal", "inv_causal", "bi_causal"


def _squares(pieces, kind):
    return [(piece, piece, kind) for piece in pieces]


def _window(pieces, width, after=0):
    """Return the slices of a window: `width` keys before each query, and `after` keys behind it."""
    found = []
    for start, stop in pieces:
        first, last = min(start + width, stop), max(stop - after, start)
        if after:
            found += [((start, first), (start, min(first + after, stop)), CAUSAL)]
            found += [((first, last), (start, stop), BICAUSAL)] if first < last else []
            found += [((max(first, last), stop), (max(first, last) - width, stop), INVCAUSAL)]
        else:
            found += [((start, first), (start, first), CAUSAL)]
            found += [((first, stop), (start, stop), BICAUSAL)] if first < stop else []
    return found


def _below(pieces, kind=FULL, back=None):
    """Return slices in which each piece sees itself and earlier pieces: all, or the last `back`."""
    first = [0 if back is None else max(0, i - back) for i in range(len(pieces))]
    return [(piece, (pieces[j][0], piece[1]), kind) for piece, j in zip(pieces, first, strict=True)]


def _prefix(pieces, length):
    return [
        x
        for start, stop in pieces
        for x in (
            ((start, stop), (start, min(start + length, stop)), FULL),
            ((min(start + length, stop), stop), (min(start + length, stop), stop), CAUSAL),
        )
        if x[0][0] < x[0][1]
    ]


def _answers(prompt, answers):
    """Return the slices of a prompt, and of answers that each see the prompt and themselves."""
    return [((0, prompt), (0, prompt), CAUSAL)] + [
        x for piece in answers for x in ((piece, (0, prompt), FULL), (piece, piece, CAUSAL))
    ]


_SHARED = _answers(EIGHTHS[0][1], EIGHTHS[1:])
FAMILIES = {  # name: slices of (queries, keys, type)
    "full": _squares(ALL, FULL),
    "causal": _squares(ALL, CAUSAL),
    "inverse causal": _squares(ALL, INVCAUSAL),
    "full documents": _squares(DOCUMENTS, FULL),
    "causal documents": _squares(DOCUMENTS, CAUSAL),
    "inverse causal documents": _squares(DOCUMENTS, INVCAUSAL),
    "documents of both kinds": [
        (piece, piece, (FULL, CAUSAL)[i % 2]) for i, piece in enumerate(DOCUMENTS)
    ],
    "causal window": _window(ALL, 60),
    "window of both sides": _window(ALL, 60, 40),
    "causal window in documents": _window(DOCUMENTS, 30),
    "window of both sides in documents": _window(DOCUMENTS, 20, 7),
    "block causal": _below(EIGHTHS),
    "block causal, two back": _below(EIGHTHS, back=2),
    "block causal in halves": _below(EIGHTHS[:4])
    + [(q, (_HALF, k[1]), kind) for q, k, kind in _below(EIGHTHS)[4:]],
    "causal blocks of video": _below(EIGHTHS, CAUSAL, back=3),
    "chunks": _squares(EIGHTHS, CAUSAL),
    "prefix": _prefix(ALL, 200),
    "prefixes of documents": _prefix(DOCUMENTS, 40),
    "shared prompt": _SHARED,
    "shared prompts of halves": _answers(_EIGHTH, EIGHTHS[1:4])
    + [
        ((q[0] + _HALF, q[1] + _HALF), (k[0] + _HALF, k[1] + _HALF), kind)
        for q, k, kind in _answers(_EIGHTH, EIGHTHS[1:4])
    ],
    "global keys and a window": [((0, TOKENS), (0, 16), CAUSAL), *_window([(16, TOKENS)], 60)],
    "queries of one half": [((_HALF, TOKENS), (0, TOKENS), CAUSAL)],
    "keys of one half": [((0, TOKENS), (0, _HALF), FULL)],
    "blocks aside": [
        (piece, EIGHTHS[(3 * i + 1) % 8], (FULL, CAUSAL, INVCAUSAL, BICAUSAL)[i % 4])
        for i, piece in enumerate(EIGHTHS)
    ],
    "pieces of a whole": [(q, k, FULL) for q in EIGHTHS for k in EIGHTHS],
}
