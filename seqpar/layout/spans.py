"""Parse the two forms in which users describe layouts: spans for each rank, or token positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seqpar.core.arguments import Ints, as_ranks, shown
from seqpar.layout.cuts.cut import Spans


class Span(NamedTuple):
    """The positions start … stop − 1 of one document."""

    document: int
    start: int
    stop: int


def parse_spans(spans_per_rank: Sequence[Iterable[tuple[int, int, int]]], cu: Ints) -> Spans:
    """Return a `Spans` cut, given a list of the spans of each rank.

    Raise a ValueError unless the spans cover every token exactly once.
    """
    expected = "(document, start, stop) triples of integers"
    try:
        per_rank = [[tuple(span) for span in spans] for spans in spans_per_rank]
    except TypeError:
        raise ValueError(f"spans_per_rank must hold {expected} for each rank") from None
    as_ranks("spans_per_rank: the number of ranks", len(per_rank))
    flat = [span for spans in per_rank for span in spans]
    if (wrong := next((span for span in flat if len(span) != 3), None)) is not None:
        raise ValueError(f"spans_per_rank must hold {expected}, got {shown(wrong)}")
    try:
        table = np.array(flat).reshape(-1, 3)
    except (TypeError, ValueError):  # an element of a triple is itself a sequence
        raise ValueError(f"spans_per_rank must hold {expected}") from None
    if table.size and table.dtype.kind not in "iu":
        raise ValueError(f"spans_per_rank must hold {expected}, got {table.dtype}")
    documents, starts, stops = table.astype(np.int64).T
    owner = np.repeat(np.arange(len(per_rank)), [len(spans) for spans in per_rank])
    _check_cover(cu, documents, starts, stops)
    return Spans.of(len(per_rank), owner, documents, starts, stops)


def _check_cover(cu: Ints, documents: Ints, starts: Ints, stops: Ints) -> None:
    lengths = np.diff(cu)
    known = (documents >= 0) & (documents < lengths.size)
    length = np.r_[lengths, -1][np.where(known, documents, -1)]
    inside = (starts >= 0) & (starts <= stops) & (stops <= length)
    if not inside.all():
        i = int(np.argmin(inside))
        span = Span(int(documents[i]), int(starts[i]), int(stops[i]))
        documents_in_all = f"there are {lengths.size} documents"
        raise ValueError(
            f"spans_per_rank must lie within the documents: {span} does not, {documents_in_all}"
        )
    nonempty = np.flatnonzero(stops > starts)
    order = nonempty[np.lexsort((starts[nonempty], documents[nonempty]))]
    begin, end = cu[documents[order]] + starts[order], cu[documents[order]] + stops[order]
    expected, found = np.r_[0, end], np.r_[begin, cu[-1]]
    if (expected != found).any():
        i = int(np.argmax(expected != found))
        what = "overlap" if found[i] < expected[i] else "leave a gap"
        low, high = sorted((int(expected[i]), int(found[i])))
        where = f"at tokens {low} to {high - 1} of the packed batch"
        raise ValueError(f"spans_per_rank must cover every token once: spans {what} {where}")


PositionIds = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.generic] | Tensor


def cu_seqlens_of(position_ids: PositionIds) -> Ints:
    """Return the cu_seqlens of documents, given the positions of tokens, (T,) or (B, S), for
    `Layout.from_position_ids`.
    """
    ids = _as_rows(position_ids)
    begins = np.ones(ids.shape, dtype=bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1] + 1
    wrong = begins & (ids != 0)
    if wrong.any():
        row, column = np.unravel_index(int(wrong.argmax()), wrong.shape)
        where = f"row {row}, column {column}" if np.ndim(position_ids) == 2 else f"index {column}"
        before = f" behind {ids[row, column - 1]}" if column else ""
        found = f"{ids[row, column]}{before} at {where}"
        raise ValueError(f"position_ids must count up from 0 in each document, got {found}")
    return np.r_[np.flatnonzero(begins), ids.size]


def _as_rows(position_ids: PositionIds) -> Ints:
    """Return `position_ids` as a 2-D int64 array. A tensor on a GPU costs one synchronisation."""
    try:
        on_cpu = position_ids.detach().cpu() if isinstance(position_ids, Tensor) else position_ids
        array = np.asarray(on_cpu)
    except (TypeError, ValueError, NotImplementedError):  # bfloat16, ragged, or without data
        raise ValueError("position_ids must be integers of shape (T,) or (B, S)") from None
    if array.ndim not in (1, 2) or (array.size and array.dtype.kind not in "iu"):
        found = f"shape {array.shape} of {array.dtype}"
        raise ValueError(f"position_ids must be integers of shape (T,) or (B, S), got {found}")
    return np.atleast_2d(array.astype(np.int64))
