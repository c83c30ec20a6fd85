"""Find the rows of other ranks that a rank needs, and the windows that contain these rows.

A *span* is a range of consecutive tokens of a document on one rank. The *window* of a row is the
row and the `reach` tokens of its document before it, in ascending order. In tables with
`following`, which are for backward, the window is the row and the tokens after it. Most windows are
consecutive local rows. The first rows of a span (with `following`, the last rows) have windows with
tokens of other spans, tokens of other ranks, or positions beyond the document. These rows are
called *edges*.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.device_tables import kept_on
from seqpar.core.ranges import overlapping, ranges
from seqpar.layout.geometry import Geometry


class HaloRows(NamedTuple):
    """The rows that a rank sends and receives, and the edges among the rows of the rank.

    An *edge* is a row for whose result the rank needs tokens that are not next to the row on this
    rank, for example tokens of other ranks. A row is given as the index of a local token or of a
    received token.
    """

    sent: Tensor  # (n,): the rows that other ranks need, sorted by rank
    sends: list[tuple[int, int]]  # (rank, number of rows) of the other ranks, ascending
    receives: list[tuple[int, int]]
    edges: Tensor  # (edges,): the rows whose windows are not consecutive local rows
    # (m,): indices in the windows of all edges, which have edges · (reach + 1) tokens
    held_places: Tensor
    held_rows: Tensor  # the local rows at these indices
    halo_places: Tensor  # indices in these windows of received rows
    halo_rows: Tensor

    @property
    def received(self) -> int:
        return sum(count for _, count in self.receives)


class _Spans(NamedTuple):
    """The spans of all ranks, sorted by rank, and the tokens [first, last) that each span needs."""

    ranks: Ints
    documents: Ints
    starts: Ints
    stops: Ints
    first: Ints
    last: Ints


def halo_rows(
    geometry: Geometry, rank: int, reach: int, following: bool, device: torch.device
) -> HaloRows:
    """Return the rows that a rank sends and receives in forward, or in backward if `following` is
    True.
    """
    build = lambda: _tables(geometry, rank, reach, following)  # noqa: E731
    return kept_on(device, geometry.derived, ("halo", rank, reach, following), build)


def sent_rows(geometry: Geometry, rank: int, reach: int, following: bool) -> list[tuple[int, int]]:
    """Return a pair (receiver, number of rows) for each rank to which `rank` sends rows,
    ascending.
    """
    return _sent(_spans(geometry, reach, following), geometry, rank)[1]


def _spans(geometry: Geometry, reach: int, following: bool) -> _Spans:
    """Return the spans of all ranks, and the tokens that each span needs from other ranks.

    If the rank holds two spans of a document that are close together, only the tokens between the
    spans are returned.
    """
    columns = [np.stack(holding.columns) for holding in geometry.holdings]
    ranks = np.repeat(np.arange(geometry.ranks), [x.shape[1] for x in columns])
    documents, starts, stops = np.concatenate(columns, axis=1)
    alike = (ranks[1:] == ranks[:-1]) & (documents[1:] == documents[:-1])
    if following:
        limits = geometry.lengths[documents]
        limits[:-1][alike] = starts[1:][alike]
        first, last = stops, np.minimum(limits, stops + reach)
    else:
        limits = np.zeros_like(starts)
        limits[1:][alike] = stops[:-1][alike]
        first, last = np.maximum(limits, starts - reach), starts
    return _Spans(ranks, documents, starts, stops, first, last)


def _sent(spans: _Spans, geometry: Geometry, rank: int) -> tuple[Ints, list[tuple[int, int]]]:
    holding = geometry.holdings[rank]
    others = np.flatnonzero((spans.ranks != rank) & (spans.last > spans.first))
    lacking = spans.documents[others], spans.first[others], spans.last[others]
    of_others, own = overlapping(lacking, holding.columns)
    first = np.maximum(lacking[1][of_others], holding.starts[own])
    last = np.minimum(lacking[2][of_others], holding.stops[own])
    peers, first_rows = spans.ranks[others][of_others], holding.offsets[own] - holding.starts[own]
    order = np.lexsort((first_rows + first, peers))
    begins, ends = (first_rows + first)[order], (first_rows + last)[order]
    return ranges(begins, ends), _counted(peers[order], ends - begins)


def _received(spans: _Spans, geometry: Geometry, rank: int) -> tuple[Ints, list[tuple[int, int]]]:
    """Return the tokens that a rank receives, and a pair (sender, number of tokens) for each
    sender.

    The tokens of each sender are in the order in which the sender sends them (`_sent`).
    """
    lacking = np.flatnonzero((spans.ranks == rank) & (spans.last > spans.first))
    others = np.flatnonzero(spans.ranks != rank)
    of_own, of_others = overlapping(
        (spans.documents[lacking], spans.first[lacking], spans.last[lacking]),
        (spans.documents[others], spans.starts[others], spans.stops[others]),
    )
    lacking, others = lacking[of_own], others[of_others]
    before = geometry.cu_seqlens[spans.documents[lacking]]
    first = before + np.maximum(spans.first[lacking], spans.starts[others])
    last = before + np.minimum(spans.last[lacking], spans.stops[others])
    order = np.lexsort((first, spans.ranks[others]))
    first, last = first[order], last[order]
    return ranges(first, last), _counted(spans.ranks[others][order], last - first)


def _counted(peers: Ints, counts: Ints) -> list[tuple[int, int]]:
    return [(peer, int(counts[peers == peer].sum())) for peer in np.unique(peers).tolist()]


def _tables(geometry: Geometry, rank: int, reach: int, following: bool) -> HaloRows:
    spans, holding = _spans(geometry, reach, following), geometry.holdings[rank]
    sent, sends = _sent(spans, geometry, rank)
    arrived, receives = _received(spans, geometry, rank)
    begins, ends = holding.offsets[:-1], holding.offsets[1:]
    if following:
        edges = ranges(np.maximum(begins, ends - reach), ends)
    else:
        edges = ranges(begins, np.minimum(ends, begins + reach))
    held = geometry.token_indices(rank)
    documents = np.repeat(holding.documents, ends - begins)[edges]
    steps = np.arange(reach + 1) - (0 if following else reach)
    tokens = held[edges][:, None] + steps
    starts, stops = geometry.cu_seqlens[documents], geometry.cu_seqlens[documents + 1]
    exists = (tokens >= starts[:, None]) & (tokens < stops[:, None])
    places, tokens = np.flatnonzero(exists), tokens[exists]
    rows = np.searchsorted(held, tokens)
    own = np.r_[held, -1][rows] == tokens
    order = np.argsort(arrived)
    halo = order[np.searchsorted(arrived[order], tokens[~own])]
    tables = sent, edges, places[own], rows[own], places[~own], halo
    leaving, *others = map(torch.from_numpy, tables)
    return HaloRows(leaving, sends, receives, *others)
