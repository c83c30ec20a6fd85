"""Draw documents from the published length distributions (`data/length_distributions.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats

PATH = Path(__file__).parents[1] / "data/length_distributions.json"
DISTRIBUTIONS: dict[str, Any] = json.loads(PATH.read_text())["distributions"]
SHORTEST = 256  # tokens; assumed, because no lengths of short documents were published
BASE = 65536  # the context for which Pretrain and ProLong were sampled
# Edges of the buckets whose token shares were published. Within a bucket, lengths are assumed to be
# log-uniform.
LONG = [2**i for i in range(16, 22)]
SHORT = 4096  # tokens: four fifths of ByteScale's documents have no more


def draw(name: str, tokens: int, context: int, seed: int = 0) -> Ints:
    """Return lengths of documents with `tokens` in total, none longer than `context`.

    Pretrain's and ProLong's lengths are scaled with the context, as in the paper's sampler. Longer
    documents are cut at the context, and the last one at the total.
    """
    generator, found, total = np.random.default_rng(seed), [], 0
    while total < tokens:
        lengths = _sample(name, 4096, context, generator).astype(np.int64).clip(1)
        pieces = np.concatenate([lengths, np.repeat(context, (lengths // context).sum())])
        rest = np.where(lengths >= context, lengths % context, lengths)
        pieces = np.concatenate([rest, pieces[lengths.size :]])
        pieces = generator.permutation(pieces[pieces > 0])
        found.append(pieces)
        total += int(pieces.sum())
    every = np.concatenate(found)
    ends = np.cumsum(every)
    count = int(np.searchsorted(ends, tokens)) + 1
    lengths = every[:count].copy()
    lengths[-1] -= ends[count - 1] - tokens
    return lengths


def _sample(name: str, count: int, context: int, generator: np.random.Generator) -> Floats:
    """Return about `count` published lengths."""
    values = DISTRIBUTIONS[name]
    uniform = generator.random(count)
    if values["kind"] == "quantiles":
        quantiles = np.array(values["quantiles_at_0_to_1_step_0.001"], np.float64)
        lengths = np.interp(uniform, np.linspace(0, 1, quantiles.size), quantiles)
        if name == "pretrain":  # 90% of the shorter ones are kept, longer ones doubled
            long = lengths >= BASE
            kept = lengths[long | (generator.random(count) < 0.9)]
            lengths = np.concatenate([kept, lengths[long]])
        return lengths * (context / BASE)
    if values["kind"] == "histogram":
        edges = np.r_[1, values["upper_edges"]].astype(np.float64)
        return _in_buckets(edges, np.array(values["percent_of_documents"]), uniform, generator)
    if values["kind"] == "two_point":
        shares, lengths = np.array(values["mixture"]).T
        return generator.choice(lengths, count, p=shares / shares.sum())
    edges = np.array([SHORTEST, SHORT, *LONG], np.float64)
    percent = [*DISTRIBUTIONS["byted"]["token_share_percent"].values()]
    documents = _documents(edges, np.array([0.0, *percent]))
    if name == "github":
        # Only the longer lengths were published. The shorter ones are assumed to be like Byted's.
        below = int(np.searchsorted(edges, 2**17))
        longer = np.array([6.4, 9.8])
        tokens = documents[:below] * _mean(edges)[:below]
        edges = np.r_[edges[: below + 1], 2.0**18, 2.0**21]
        tokens = np.r_[tokens * (100 - longer.sum()) / tokens.sum(), longer]
        documents = tokens / _mean(edges)
    return _in_buckets(edges, documents, uniform, generator)


def _mean(edges: Floats) -> Floats:
    """Return the mean length in each bucket of log-uniform lengths."""
    return np.diff(edges) / np.diff(np.log(edges))


def _documents(edges: Floats, percent: Floats) -> Floats:
    """Return the relative number of documents in each bucket, from its share of tokens.

    The published share of the second bucket covers the first two. The first has four fifths of all
    documents.
    """
    mean = _mean(edges)
    count = percent / mean
    longer = count[2:].sum()
    count[1] = (percent[1] - 4 * longer * mean[0]) / (4 * mean[0] + mean[1])
    count[0] = 4 * (count[1] + longer)
    return count


def _in_buckets(
    edges: Floats, weights: Floats, uniform: Floats, generator: np.random.Generator
) -> Floats:
    """Return lengths in buckets drawn by weight, log-uniform within a bucket."""
    bucket = generator.choice(weights.size, uniform.size, p=weights / weights.sum())
    low, high = np.log(edges[bucket]), np.log(edges[bucket + 1])
    return np.exp(low + uniform * (high - low))
