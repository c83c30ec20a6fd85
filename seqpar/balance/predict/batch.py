"""The documents of one micro-batch, their costs, and the capacity of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats, Tasks

# The least number of tokens of a cut document on a rank: one tile of a kernel.
MIN_SHARE_TOKENS = 128
WAYS = (False, True)  # forward, backward
# A number of tokens at which FLOPs take longer than reading the weights.
COMPUTE_BOUND_TOKENS = 2**20


@dataclass(frozen=True)
class Offloading:
    """Activations that are kept in host memory until backward, so that ranks hold more tokens.

    Ge et al., "ByteScale" (2025), section 4. For a document of s tokens, r is the largest fraction
    of activations that can be copied to the host while the document is computed. D(s) is the
    smallest number of ranks with capacity C that can hold the remaining activations:

        T(s) ≥ r·Act(s)/min(B_d2h, B_h2d)
        D(s) = ⌈[2·Act(s) + (1 − r)(l − 2)·Act(s)] / (l·Act(C))⌉

    Act is the bytes of activations of a layer, T the time of a layer, and l the number of layers.
    B_d2h and B_h2d are the bandwidths of copies to the host and back.

    With `seqpar.offload(r)` around the model, a fraction 1 − r of each layer's activations stays on
    the device. In two layers, the other fraction r is also on the device, because it is being
    copied to the host or back.
    """

    most: float  # largest fraction of a rank's activations to offload, from 0 to 1
    capacity: int  # tokens whose activations fit on a device
    layers: int  # number of the model's layers
    copy_seconds: float  # seconds for copying all activations of a token to the host

    @classmethod
    def of(cls, costs: Costs, capacity: int, most: float, checkpointing: str) -> Offloading:
        """Return the limits of offloading with this kind of checkpointing."""
        copied = float(costs.kept_bytes(1, checkpointing)) / costs.cluster.host.rate
        return cls(most, capacity, len(costs.model.layers), copied)

    @property
    def free(self) -> float:
        """The fraction of activations that is not on the device if all activations are offloaded:
        (l − 2)/l for l layers.
        """
        return max(self.layers - 2, 0) / self.layers

    def kept(self, tokens: Ints, forward: Floats) -> Floats:
        """Return the fractions of activations that stay on the device: [2 + (1 − r)(l − 2)]/l.

        l is the number of layers. r is the largest fraction of activations, up to `most`, that can
        be copied to the host during the forward pass.
        """
        return 1 - np.minimum(forward / (tokens * self.copy_seconds), self.most) * self.free

    def needed(self, tokens: Ints) -> Floats:
        """Return, for each rank, the smallest fraction of activations to offload so that the rank
        can hold its number of tokens. A fraction is at most `most`.
        """
        if not self.free:
            return np.zeros(tokens.shape)
        over = 1 - self.capacity / np.maximum(tokens, self.capacity)
        return np.minimum(over / self.free, self.most)


@dataclass(frozen=True, eq=False)
class DocumentBatch:
    lengths: Ints  # (documents,) the tokens of each document, at least 1
    attention: Floats  # (2, documents) seconds of each document's attention, forward and backward
    costs: Costs  # the costs of work and messages
    capacity: int  # tokens that a rank can hold if all of their activations stay on its device
    offloading: Offloading | None = None  # the limits of copies to host memory; None: no copies
    remap: bool = False  # whether linear modules run on equal numbers of tokens per rank

    @classmethod
    def of(
        cls,
        lengths: Ints,
        costs: Costs,
        capacity: int,
        offloading: Offloading | None = None,
        remap: bool = False,
    ) -> DocumentBatch:
        attention = [costs.span_work(np.zeros_like(lengths), lengths, way) for way in WAYS]
        return cls(lengths, np.stack(attention), costs, capacity, offloading, remap)

    @property
    def ranks(self) -> int:
        return self.costs.cluster.ranks

    def part(self, documents: Ints) -> DocumentBatch:
        attention = self.attention[:, documents]
        return replace(self, lengths=self.lengths[documents], attention=attention)

    @cached_property
    def kept(self) -> Floats:
        """The fraction (documents,) of each document's activations that stays on devices.

        Activations are offloaded as far as compute can hide their copies.
        """
        if self.offloading is None:
            return np.ones(self.lengths.size)
        forward = self.attention[0] + self.token_seconds[0] * self.lengths
        return self.offloading.kept(self.lengths, forward)

    @cached_property
    def held(self) -> Floats:
        """(documents,): how many tokens of a rank's capacity each document uses. A document whose
        activations are offloaded uses fewer tokens of capacity than it has.
        """
        return self.lengths * self.kept

    @property
    def room(self) -> int:
        """The number of tokens that all ranks can hold together. With offloading, up to one token
        of each rank's capacity is not used.
        """
        return (self.capacity - (self.offloading is not None)) * self.ranks

    @cached_property
    def token_seconds(self) -> Floats:
        """(2,) seconds of linear modules per token, forward and backward."""
        seconds = [self.costs.tokenwise(COMPUTE_BOUND_TOKENS, way) for way in WAYS]
        return np.array(seconds) / COMPUTE_BOUND_TOKENS

    @cached_property
    def weights(self) -> Floats:
        """The seconds (documents,) that each whole document adds to a rank. The methods for placing
        documents balance the sums of these seconds.
        """
        return self.attention.sum(0) + self.linear * (not self.remap)

    @cached_property
    def linear(self) -> Floats:
        """The seconds (documents,) of linear modules for each document, forward and backward
        together.
        """
        return self.token_seconds.sum() * self.lengths

    @cached_property
    def seconds(self) -> Floats:
        """The seconds (documents,) of each whole document, forward and backward together."""
        return self.attention.sum(0) + self.linear

    @cached_property
    def mean(self) -> float:
        """The mean of the seconds that documents add to a rank. If linear modules use a separate
        layout, only attention is included.
        """
        return float(self.weights.sum()) / self.ranks

    @cached_property
    def ideal(self) -> float:
        """The seconds of a rank if nothing were sent and all work were divided equally.

        The work of linear modules is included.
        """
        return float(self.seconds.sum()) / self.ranks

    def lower_bound(self) -> float:
        """Return a lower bound on the seconds of any plan, according to the predicted costs.

        The bound is the largest of three times: the mean time of the ranks, the time in which all
        ranks together compute the longest document, and the time of a rank with a single token. All
        three times include the constant cost of one attention call per layer, but no messages.
        """
        if not self.lengths.size:
            return 0.0
        calls = sum(self.costs.call_seconds(way) for way in WAYS)
        longest = float((self.seconds / np.minimum(self.lengths, self.ranks)).max())
        least = sum(float(self.costs.tokenwise(1, way)) for way in WAYS)
        return max(self.ideal, longest, least) + calls

    @cached_property
    def longest_first(self) -> Ints:
        return self.by_length(np.arange(self.lengths.size))

    def by_length(self, documents: Ints) -> Ints:
        """Return documents sorted by length, the longest first. Documents of equal length keep
        their order.
        """
        return documents[np.argsort(-self.lengths[documents], kind="stable")]

    @property
    def windows(self) -> list[int]:
        return sorted({x.window for x in self.costs.model.layers if x.window is not None})

    @cached_property
    def most_ranks(self) -> Ints:
        """The largest number of ranks (documents,) over which each document can be cut."""
        return np.clip(self.lengths // MIN_SHARE_TOKENS, 1, self.ranks)

    @cached_property
    def least_ranks(self) -> Ints:
        """The smallest number of ranks (documents,) that can hold each document."""
        return np.ceil(self.held / self.capacity).astype(np.int64)

    def ring_held(self, documents: Ints, sizes: Ints) -> Floats:
        """Return (documents,): how many tokens of a rank's capacity each document uses, on the rank
        that holds most of the document. The document is cut over `sizes` ranks.
        """
        # Each rank of a ring has two chunks, each of which can have one token more than other
        # chunks.
        tokens = -(-self.lengths[documents] // sizes) + 2 * (sizes > 1)
        return tokens * self.kept[documents]

    def shares_of(self, seconds: float) -> Ints:
        """Return over how many ranks to cut each document so that a rank computes its part in about
        `seconds`.

        The numbers are between `least_ranks` and `most_ranks`.
        """
        wanted = np.minimum(np.ceil(self.weights / max(seconds, 1e-30)), self.most_ranks)
        return np.maximum(wanted.astype(np.int64), self.least_ranks)

    @cached_property
    def hidden_share(self) -> dict[str, float]:
        """The least number of tokens of one document that a rank must hold so that computation
        hides the messages of a ring. There is one number for each kind of link.

        The ranks that hold one document form a ring, as in `RingAttention`. The number is infinite
        if the model has no softmax layers, or if computation and messages do not overlap.
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
    """Spans of documents and the ranks that hold them, as (n,) arrays."""

    documents: Ints
    ranks: Ints
    starts: Ints
    stops: Ints

    @classmethod
    def rings(cls, batch: DocumentBatch, documents: Ints, sizes: Ints, members: Ints) -> Pieces:
        """Cut each document over a ring of `sizes` ranks.

        `members` lists the ranks of the first ring, then the ranks of the second ring, and so on.
        """
        if (sizes == 1).all():
            return cls(documents, members, np.zeros_like(documents), batch.lengths[documents])
        # Rank i of G gets chunks i and 2G − 1 − i of 2G, cut at ⌊cL/2G⌋ (Zeppelin, section 4.2).
        size = np.repeat(sizes, sizes)
        i = np.arange(size.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        document = np.repeat(documents, sizes)
        length = batch.lengths[document]
        chunks = np.stack([i, 2 * size - 1 - i])
        starts, stops = ((length * x // (2 * size)).ravel() for x in (chunks, chunks + 1))
        whole = cls(np.tile(document, 2), np.tile(members, 2), starts, stops)
        # A ring of one rank holds a whole document as one span, instead of two adjacent spans.
        single = size == 1
        whole.stops[: size.size][single] = length[single]
        kept = np.r_[np.ones(size.size, bool), ~single] & (whole.stops > whole.starts)
        return whole.take(kept)

    def whole(self, batch: DocumentBatch) -> NDArray[np.bool_]:
        return self.stops - self.starts == batch.lengths[self.documents]

    def take(self, chosen: NDArray[np.bool_]) -> Pieces:
        return Pieces(*(column[chosen] for column in self))

    def shares(self, ranks: int) -> tuple[Ints, Ints, Ints]:
        """Return the documents and ranks of all shares, sorted, and the index of the share of each
        piece. A share is all pieces of one document on one rank.
        """
        found, share = np.unique(self.documents * ranks + self.ranks, return_inverse=True)
        documents, owners = np.divmod(found, ranks)
        return documents, owners, share

    def held(self, batch: DocumentBatch) -> Floats:
        """Return how many tokens of a rank's capacity each piece uses."""
        return (self.stops - self.starts) * batch.kept[self.documents]

    def held_by_rank(self, batch: DocumentBatch) -> Floats:
        return np.bincount(self.ranks, self.held(batch), batch.ranks).astype(np.float64)

    @classmethod
    def joined(cls, parts: list[Pieces]) -> Pieces:
        none = np.zeros(0, np.int64)
        return cls(*map(np.concatenate, zip(cls(none, none, none, none), *parts, strict=True)))
