"""`Geometry`: which tokens each rank holds, as arrays of spans. `Layout` wraps it for users.

A *span* is a range of positions of one document that one rank holds. The tokens on a rank are
ordered by document, and within a document by position. A *row* is the index of a token in this
order. A *run* is all tokens of one document on one rank.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import MAX_LISTED, Ints, listed
from seqpar.core.memo import Memo
from seqpar.core.ranges import POSITION_BITS, mix, ranges, sort_keys, split_at
from seqpar.layout.cuts.cut import Columns, Cut, HolderLookup, Merged, TableCut, joined, merged

_MAX_KEPT_BYTES = 2**26  # limit for cached holdings


class Runs(NamedTuple):
    """The runs of a rank. A *run* is all tokens of one document on the rank. Run i has the spans
    first_spans[i] … stop_spans[i] − 1.
    """

    documents: Ints
    first_spans: Ints
    stop_spans: Ints


class Holding:
    """The spans that one rank holds, as arrays, in the order of the rank's rows.

    Adjacent spans are joined.
    """

    def __init__(self, columns: Columns) -> None:
        # The document, start and stop of each span, (spans,). `offsets` is the row at which each
        # span begins, (spans + 1,).
        self.columns, _ = joined(columns)
        self.documents, self.starts, self.stops = self.columns
        self.offsets = np.r_[0, np.cumsum(self.stops - self.starts)]
        self._sort_keys = sort_keys(self.documents, self.starts)

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def positions(self) -> NDArray[np.int32]:
        """The position of each row in its document, (tokens,) int32."""
        return ranges(self.starts, self.stops).astype(np.int32)

    def aligned(self, shift: Ints) -> NDArray[np.int32]:
        """Return, for each row, its position in its document plus the `shift` of this document."""
        if not shift.any():
            return self.positions
        of_rows = np.repeat(shift[self.documents], self.stops - self.starts)
        return (self.positions + of_rows).astype(np.int32)

    @cached_property
    def runs(self) -> Runs:
        documents, first = np.unique(self.documents, return_index=True)
        return Runs(documents, first, np.r_[first[1:], self.documents.size][: first.size])

    def spans_in(self, starts: Ints, stops: Ints) -> tuple[Ints, Columns]:
        """Return the parts of spans that lie in some ranges of rows.

        The ranges ascend and do not overlap. For each part, the result has the index of the range
        that contains it, its document, and its positions.
        """
        span, first, last = split_at(self.offsets, starts, stops)
        index = np.searchsorted(stops, self.offsets[span] + first, side="right")
        start = self.starts[span]
        return index, (self.documents[span], start + first, start + last)

    def holds_some(self, begins: Ints, ends: Ints) -> NDArray[np.bool_]:
        """Return, for each of some nonempty ranges of `sort_keys`, whether the rank has a row in
        this range.
        """
        stops = sort_keys(self.documents, self.stops)
        # the first span that ends after `begins`
        found = np.searchsorted(stops, begins, side="right")
        return np.r_[self._sort_keys, np.iinfo(np.int64).max][found] < ends

    def rows_before(self, documents: Ints, positions: Ints) -> Ints:
        if not self.documents.size:
            return np.zeros_like(documents)
        # np.clip would be slower.
        positions = np.minimum(np.maximum(positions, 0), 2**POSITION_BITS - 1)
        # The last span that begins at or before each position, or −1.
        found = np.searchsorted(self._sort_keys, sort_keys(documents, positions), side="right") - 1
        span = np.maximum(found, 0)
        length = self.stops[span] - self.starts[span]
        inside = np.minimum(positions - self.starts[span], length)
        inside = np.where(self.documents[span] == documents, inside, length)
        return np.where(found < 0, 0, self.offsets[span] + inside)


class Holdings(Sequence[Holding]):
    """The `Holding` of each rank, which is made at its first use.

    Because all holdings together may be very large, at most `_MAX_KEPT_BYTES` bytes are cached.
    """

    def __init__(self, cu_seqlens: Ints, cut: Cut) -> None:
        self._cu_seqlens, self._cut = cu_seqlens, cut
        self._kept: dict[int, Holding] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return self._cut.ranks

    def __getitem__(self, rank: int) -> Holding:  # type: ignore[override]  # not a slice
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        holding = self._kept.get(rank)
        if holding is None:
            holding = Holding(self._cut.columns(self._cu_seqlens, rank))
            nbytes = 64 * holding.documents.size + 4 * holding.tokens  # includes positions and runs
            if self._kept_bytes + nbytes > _MAX_KEPT_BYTES:
                self._kept, self._kept_bytes = {}, 0
            self._kept[rank] = holding
            self._kept_bytes += nbytes
        return holding


class Geometry:
    """The documents of a packed batch and their cut, with a `Holding` for each rank.

    A geometry also stores all tables that other code derives from it.
    """

    def __init__(self, cu_seqlens: Ints, cut: Cut) -> None:
        self.cu_seqlens, self.cut = cu_seqlens, cut
        self.holdings = Holdings(cu_seqlens, cut)
        self.lengths = np.diff(cu_seqlens)
        self.derived = Memo()
        self._derived_with: weakref.WeakKeyDictionary[Geometry, Memo] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, object]:
        # `_derived_with` refers to other geometries of this process. `holders` is a function that
        # cannot be pickled. It is made again when it is needed.
        state = {**vars(self), "_derived_with": None}
        state.pop("holders", None)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _derived_with=weakref.WeakKeyDictionary())

    @property
    def tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def ranks(self) -> int:
        return len(self.holdings)

    def all_spans(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the ranks, documents, starts and stops of all spans, as arrays (n,)."""
        if isinstance(self.cut, TableCut):
            edges, columns = self.cut.table(self.cu_seqlens)
            return np.repeat(np.arange(self.ranks), np.diff(edges)), *columns
        parts = [self.cut.columns(self.cu_seqlens, rank) for rank in range(self.ranks)]
        documents, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
        ranks = np.repeat(np.arange(self.ranks), [part[0].size for part in parts])
        return ranks, documents, starts, stops

    def merged_holding(self, ranks: Sequence[int]) -> Holding:
        return Holding(merged([self.holdings[rank].columns for rank in ranks]))

    @property
    def worst_case(self) -> Geometry:
        """The geometry for which messages are planned. Usually, it is this object itself.

        A *geometry* says which tokens each rank holds. If the layout has `most_documents`, the
        sizes of messages must not depend on the documents. In this case, the result is a geometry
        in which all tokens belong to a single document.
        """
        if not self.cut.most_documents:
            return self
        return self.derived(("worst case",), lambda: Geometry(self.cu_seqlens[[0, -1]], self.cut))

    @cached_property
    def most_tokens(self) -> int:
        return int(self.cut.token_counts(self.cu_seqlens).max())

    @cached_property
    def holders(self) -> HolderLookup:
        return self.cut.holders(self.cu_seqlens)

    def derived_with(self, other: Geometry) -> Memo:
        """Return the memo of tables that depend on this geometry and on `other`.

        The memo is freed as soon as one of the two geometries is freed.
        """
        if other is self:
            return self.derived
        return self._derived_with.setdefault(other, Memo())

    def same_as(self, other: Geometry) -> bool:
        if self is other:
            return True
        return np.array_equal(self.cu_seqlens, other.cu_seqlens) and self.digest == other.digest

    def merged_ranks(self, size: int) -> Geometry:
        make = partial(Geometry, self.cu_seqlens, Merged(self.cut, size))
        return self.derived(("merged ranks", size), make)

    def token_indices(self, rank: int) -> Ints:
        holding = self.holdings[rank]
        first = self.cu_seqlens[holding.documents]
        return ranges(first + holding.starts, first + holding.stops)

    def described(self) -> dict[str, str]:
        """Return the content of the geometry as texts, for errors that show how the layouts of
        ranks differ.
        """
        tokens = self.cut.token_counts(self.cu_seqlens)
        words = {
            "documents": f"{self.lengths.size} documents of {listed(self.lengths.tolist())} tokens",
            "ranks": f"{listed(tokens.tolist())} tokens on {self.ranks} ranks",
        }
        for rank in range(min(self.ranks, MAX_LISTED)):
            columns = Holding(self.cut.columns(self.cu_seqlens, rank)).columns
            first = [column[: MAX_LISTED + 1].tolist() for column in columns]
            spans = listed(list(zip(*first, strict=True)))
            words[f"rank {rank}"] = f"spans (document, start, stop) {spans} on rank {rank}"
        return words | {"digest": f"spans with the digest {self.digest[:16]}"}

    @cached_property
    def digest(self) -> str:
        """A hash of which rank holds which token. The hash does not depend on the kind of cut."""
        # If the cut is the same for all documents of equal length, these documents are hashed once.
        lengths, documents = self.lengths, np.arange(self.lengths.size)
        if self.cut.alike:
            lengths, documents = np.unique(lengths, return_inverse=True)
        cu_seqlens = np.r_[0, np.cumsum(lengths)]
        hashes = np.zeros(lengths.size, np.uint64)
        for rank in range(self.ranks):
            holding = Holding(self.cut.columns(cu_seqlens, rank))
            spans = mix(sort_keys(holding.starts, holding.stops), rank)
            held, first, _ = holding.runs
            hashes[held] += np.add.reduceat(spans, first) if first.size else spans
        numbers = [n for n in (self.ranks, self.cut.most_documents) if n]
        content = np.concatenate([numbers, self.cu_seqlens, hashes[documents].view(np.int64)])
        return hashlib.sha256(content.astype("<i8").tobytes()).hexdigest()
