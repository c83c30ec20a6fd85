"""The batches of a sweep: masks, and documents whose lengths are distributed as in known
collections.

The name of a batch has up to three parts:

* the kind of the mask, as in "causal", "full" or "prefix";
* for packed batches, "-" and the name of a collection, as in "causal-pile";
* for some kinds, ":" and a number, as in "window:1024", "full-window:512" or "window-pile:256".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints, shown
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask, slices_between

KINDS = ("causal", "full", "window", "full-window", "prefix")
# Default numbers; None stands for half of a document.
NUMBERED = {"window": 1024, "full-window": 512, "prefix": None}
_EDGES = (
    0, 10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768, 49152, 65536,
    131072, 196608, 393216,
)  # fmt: skip
# Histograms of document lengths: the edges of bins in tokens, and the number or percentage of
# documents in each bin. Lengths are uniform within a bin, as in the benchmarks that publish these
# histograms. The first three collections are from LongCA-bench (arXiv 2510.17896), and the last one
# is from MagiAttention's benchmark.
COLLECTIONS: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {
    "pile": ((*_EDGES, 524288, 9323147), (
        1103032, 9192701, 15691267, 33759245, 49972885, 19843834, 11070542, 6568231, 4588038,
        1029929, 289899, 159160, 45191, 33943, 17976, 30466, 7054, 2992, 266, 422,
    )),
    "prolong64k": (_EDGES[:16], (
        15144, 544051, 2113605, 4353117, 8399774, 5991350, 2590745, 906066, 333593, 82249, 35834,
        60844, 33893, 51821, 53497,
    )),
    "prolong512k": ((*_EDGES, 475862), (
        12527, 511697, 1800359, 3756513, 6876068, 4519766, 1849207, 603531, 210114, 48472, 18762,
        33780, 18271, 32477, 34829, 1219, 2960, 5292, 842,
    )),
    "magi": (
        (0, 10, 50, 100, 200, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 192000),
        (0.22, 2.91, 5.2, 10.23, 28.19, 24.64, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14),
    ),
}  # fmt: skip
_QUARTER = ("magi",)  # the benchmark limits documents to a quarter of the batch


def parse(name: str) -> tuple[str, str | None, int | None]:
    words, colon, number = name.partition(":")
    kind, _, last = words.rpartition("-")
    collection = last if last in COLLECTIONS else None
    if collection is None:
        kind = words
    if kind not in KINDS:
        raise ValueError(
            f"masks must be among {list(KINDS)}, alone or followed by one of "
            f"{list(COLLECTIONS)}, as in causal-pile, got {shown(name)}"
        )
    if not colon:
        return kind, collection, NUMBERED.get(kind)
    if kind not in NUMBERED or not number.isascii() or not number.isdigit() or len(number) > 12:
        expected = f"only {list(NUMBERED)} have a number of tokens"
        raise ValueError(f"masks: {expected}, as in window:1024, got {shown(name)}")
    return kind, collection, int(number)


@dataclass(frozen=True)
class PackedBatch:
    """A packed batch, with the mask arguments of an attention call."""

    cu_seqlens: Ints
    causal: bool
    window_size: tuple[int, int]
    prefix_lens: Ints | None

    @classmethod
    def of(cls, mask: str, tokens: int, seed: int = 0) -> PackedBatch:
        """Return the batch of this name with `tokens` tokens."""
        kind, collection, number = parse(mask)
        lengths = np.array([tokens]) if collection is None else draw(collection, tokens, seed)
        cu_seqlens = np.r_[0, np.cumsum(lengths)]
        prefix = None
        if kind == "prefix":
            prefix = lengths // 2 if number is None else np.minimum(lengths, number)
        window = (-1, -1)
        if number is not None and kind in ("window", "full-window"):
            window = (number, 0) if kind == "window" else (number, number)
        return cls(cu_seqlens, kind in ("causal", "window", "prefix"), window, prefix)

    @property
    def tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def plain(self) -> bool:
        """Whether the batch is one document with a causal or full mask, as libraries require."""
        return len(self.cu_seqlens) == 2 and self.window_size == (-1, -1) and not self.has_prefix

    @property
    def has_prefix(self) -> bool:
        return self.prefix_lens is not None

    @property
    def options(self) -> dict[str, object]:
        options: dict[str, object] = {"causal": self.causal, "window_size": self.window_size}
        if self.has_prefix:
            options["prefix_lens"] = self.prefix_lens
        return options

    @property
    def area(self) -> int:
        geometry = Layout.contiguous(self.cu_seqlens, 1).geometry
        mask = Mask.of(self.causal, self.window_size, self.prefix_lens, geometry)
        return slices_between(geometry, 0, geometry, 0, mask).area

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        cu = torch.from_numpy(self.cu_seqlens).to(queries.device)
        query_document = torch.searchsorted(cu, queries, right=True) - 1
        key_document = torch.searchsorted(cu, keys, right=True) - 1
        distance = keys - queries[:, None]
        left, right = self.window_size[0], 0 if self.causal else self.window_size[1]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        if self.prefix_lens is not None:
            prefix = torch.from_numpy(self.prefix_lens).to(queries.device)
            seen |= keys - cu[key_document] < prefix[key_document]
        return seen & (query_document[:, None] == key_document)


def draw(collection: str, tokens: int, seed: int = 0) -> Ints:
    """Return random document lengths with a sum of `tokens`. The last document is cut to fit."""
    edges, weights = map(np.array, COLLECTIONS[collection])
    longest = max(1, tokens // 4) if collection in _QUARTER else tokens
    generator = np.random.default_rng(seed)
    drawn: list[Ints] = []
    total = 0
    while total < tokens:
        buckets = generator.choice(weights.size, 4096, p=weights / weights.sum())
        low, high = edges[buckets] + 1, edges[buckets + 1]
        lengths = low + (generator.random(low.size) * (high + 1 - low)).astype(np.int64)
        drawn.append(lengths.clip(1, longest))
        total += int(drawn[-1].sum())
    ends = np.cumsum(np.concatenate(drawn))
    count = int(np.searchsorted(ends, tokens)) + 1
    return np.diff(np.r_[0, ends[: count - 1], tokens])
