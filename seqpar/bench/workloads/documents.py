"""Document lengths of well-known collections, for drawing packed batches.

The published tables give the number of documents between two lengths. Within these bounds, lengths
are uniform, as in the benchmarks that publish the tables.
"""

from __future__ import annotations

import numpy as np

from seqpar.core.arguments import Ints

_EDGES = (
    *(0, 10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768, 49152, 65536),
    *(131072, 196608, 393216),
)
# Edges in tokens, and the documents (or percent of them) between two edges. The first three tables
# come from LongCA-bench (arXiv 2510.17896), the last from MagiAttention's benchmark.
COLLECTIONS: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {
    "pile": (
        (*_EDGES, 524288, 9323147),
        (
            *(1103032, 9192701, 15691267, 33759245, 49972885, 19843834, 11070542, 6568231),
            *(4588038, 1029929, 289899, 159160, 45191, 33943, 17976, 30466, 7054, 2992, 266, 422),
        ),
    ),
    "prolong64k": (
        _EDGES[:16],
        (
            *(15144, 544051, 2113605, 4353117, 8399774, 5991350, 2590745, 906066),
            *(333593, 82249, 35834, 60844, 33893, 51821, 53497),
        ),
    ),
    "prolong512k": (
        (*_EDGES, 475862),
        (
            *(12527, 511697, 1800359, 3756513, 6876068, 4519766, 1849207, 603531),
            *(210114, 48472, 18762, 33780, 18271, 32477, 34829, 1219, 2960, 5292, 842),
        ),
    ),
    "magi": (
        (0, 10, 50, 100, 200, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 192000),
        (0.22, 2.91, 5.2, 10.23, 28.19, 24.64, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14),
    ),
}
_QUARTER = ("magi",)  # its protocol limits documents to a quarter of the batch


def draw(collection: str, tokens: int, seed: int = 0) -> Ints:
    """Return document lengths with `tokens` in total; the last document is cut to fit."""
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
