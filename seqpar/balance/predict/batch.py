"""Batch: the documents of one micro-batch, what each costs, and what the ranks may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.balance.predict.offloading import Offloading
from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats, Tasks

MIN_SHARE_TOKENS = 128  # of a cut document on a rank: one tile of a kernel
WAYS = (False, True)  # forward, backward
COMPUTE_BOUND_TOKENS = 2**20  # enough that their FLOPs take longer than reading the weights


@dataclass(frozen=True, eq=False)
class DocumentBatch:
    """Documents for the ranks of a cluster.

    Attributes:
        lengths: (documents,) tokens of each, none 0; they fit into the ranks' capacity together.
        attention: (2, documents) seconds of each one's attention, forward and backward.
        costs: what work and messages cost.
        capacity: tokens that a rank may hold, all of whose activations stay on it.
        offloading: what ranks may copy to host memory; None: nothing.
        remap: whether linear modules run on as many tokens on each rank, so that attention alone
            is balanced.
    """

    lengths: Ints
    attention: Floats
    costs: Costs
    capacity: int
    offloading: Offloading | None = None
    remap: bool = False

    @classmethod
    def of(
        cls,
        lengths: Ints,
        costs: Costs,
        capacity: int,
        offloading: Offloading | None = None,
        remap: bool = False,
    ) -> DocumentBatch:
        """Return the batch of documents of these lengths."""
        attention = [costs.span_work(np.zeros_like(lengths), lengths, way) for way in WAYS]
        return cls(lengths, np.stack(attention), costs, capacity, offloading, remap)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.costs.cluster.ranks

    def part(self, documents: Ints) -> DocumentBatch:
        """Return the batch of some of the documents."""
        attention = self.attention[:, documents]
        return replace(self, lengths=self.lengths[documents], attention=attention)

    @cached_property
    def kept(self) -> Floats:
        """(documents,) which share of each one's activations stays on devices, the copy hidden."""
        if self.offloading is None:
            return np.ones(self.lengths.size)
        forward = self.attention[0] + self.token_seconds[0] * self.lengths
        return self.offloading.kept(self.offloading.hidden(self.lengths, forward))

    @cached_property
    def held(self) -> Floats:
        """(documents,) tokens of capacity that each takes."""
        return self.lengths * self.kept

    @property
    def room(self) -> int:
        """Tokens of capacity that documents may take together.

        With offloading a rank may be left with room for less than a token.
        """
        return (self.capacity - (self.offloading is not None)) * self.ranks

    @cached_property
    def token_seconds(self) -> Floats:
        """(2,) seconds of a token's linear modules, forward and backward."""
        return (
            np.array([self.costs.tokenwise(COMPUTE_BOUND_TOKENS, way) for way in WAYS])
            / COMPUTE_BOUND_TOKENS
        )

    @cached_property
    def weights(self) -> Floats:
        """(documents,) seconds that each adds to a rank that has it whole: what is balanced."""
        return self.attention.sum(0) + self.linear * (not self.remap)

    @cached_property
    def linear(self) -> Floats:
        """(documents,) seconds of each one's linear modules, forward and backward."""
        return self.token_seconds.sum() * self.lengths

    @cached_property
    def mean(self) -> float:
        """The seconds of each rank that documents add, if work could be cut anywhere."""
        return float(self.weights.sum()) / self.ranks

    @cached_property
    def ideal(self) -> float:
        """The seconds of each rank if nothing were sent, and work could be cut anywhere."""
        return float((self.attention.sum(0) + self.linear).sum()) / self.ranks

    @cached_property
    def longest_first(self) -> Ints:
        """The documents, longest first; of equal ones the first one first."""
        return self.by_length(np.arange(self.lengths.size))

    def by_length(self, documents: Ints) -> Ints:
        """Return documents, longest first; of equal ones the first one first."""
        return documents[np.argsort(-self.lengths[documents], kind="stable")]

    @property
    def windows(self) -> list[int]:
        """The different windows of the model's window layers."""
        return sorted({x.window for x in self.costs.model.layers if x.window is not None})

    @cached_property
    def most_ranks(self) -> Ints:
        """(documents,) how many ranks each may be cut over."""
        return np.clip(self.lengths // MIN_SHARE_TOKENS, 1, self.ranks)

    @cached_property
    def least_ranks(self) -> Ints:
        """(documents,) how many ranks it takes to hold each."""
        return np.ceil(self.held / self.capacity).astype(np.int64)

    def shares_of(self, seconds: float) -> Ints:
        """Return over how many ranks each document is cut so that none has more seconds of it."""
        wanted = np.minimum(np.ceil(self.weights / max(seconds, 1e-30)), self.most_ranks)
        return np.maximum(wanted.astype(np.int64), self.least_ranks)

    @cached_property
    def hidden_share(self) -> dict[str, float]:
        """Tokens a rank must have of a ring for its messages to hide under its work, by link.

        There compute, which is quadratic, crosses communication, which is linear: a step has so
        many queries over as many keys, and sends as many. It is infinite without softmax layers,
        and where messages and work do not overlap.
        """
        tokens = MIN_SHARE_TOKENS * 2.0 ** np.arange(0, 14, 0.125)
        work = self.costs.attention(Tasks.of(tokens, tokens, tokens**2))
        has_softmax = any(layer.kind == "softmax" for layer in self.costs.model.layers)
        found = {}
        for name in ("inside", "between"):
            link = getattr(self.costs.cluster, name)
            longer = np.flatnonzero(work < link.seconds(self.costs.kv_bytes(tokens)))
            after = longer[-1] + 1 if longer.size else 0
            hides = has_softmax and self.costs.cluster.overlaps and after < tokens.size
            found[name] = float(tokens[after]) if hides else np.inf
        return found


class Pieces(NamedTuple):
    """Spans of documents and the ranks that hold them, as (n,) arrays; together all tokens."""

    documents: Ints
    ranks: Ints
    starts: Ints
    stops: Ints

    @classmethod
    def rings(cls, batch: DocumentBatch, documents: Ints, sizes: Ints, members: Ints) -> Pieces:
        """Cut each document over a ring, and give its parts to the ring's members, in order.

        Rank i of G gets chunks i and 2G − 1 − i of 2G, cut at ⌊cL/2G⌋ (Zeppelin, section 4.2).
        `members` has the ranks of one ring after another.
        """
        if (sizes == 1).all():
            return cls(documents, members, np.zeros_like(documents), batch.lengths[documents])
        size = np.repeat(sizes, sizes)
        i = np.arange(size.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        document = np.repeat(documents, sizes)
        length = batch.lengths[document]
        low, high = i, 2 * size - 1 - i
        whole = cls(
            np.concatenate([document, document]),
            np.concatenate([members, members]),
            np.concatenate([length * low // (2 * size), length * high // (2 * size)]),
            np.concatenate([length * (low + 1) // (2 * size), length * (high + 1) // (2 * size)]),
        )
        # A ring of one is a whole document: one span of it, not two that touch.
        single = size == 1
        whole.stops[: size.size][single] = length[single]
        kept = np.r_[np.ones(size.size, bool), ~single] & (whole.stops > whole.starts)
        return cls(*(column[kept] for column in whole))

    def whole(self, batch: DocumentBatch) -> NDArray[np.bool_]:
        """Return (n,): whether each piece is all of its document."""
        return self.stops - self.starts == batch.lengths[self.documents]

    @classmethod
    def joined(cls, parts: list[Pieces]) -> Pieces:
        """Return the pieces of all parts."""
        none = np.zeros(0, np.int64)
        if not parts:
            return cls(none, none, none, none)
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
