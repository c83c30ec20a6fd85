"""Common masks as lists of ranges, for `seqpar.Mask.of_ranges`.

Each function returns a list of (document, q_start, q_stop, k_start, k_stop, low, high), whose
positions count from the start of the document. Lists of other documents can be joined with `+`, and
ranges of some documents picked by their first number, so documents of a packed batch may have
different masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from seqpar.core.arguments import (
    CuSeqlens,
    as_bool,
    as_int,
    as_int_array,
    as_lengths,
    parse_cu_seqlens,
    shown,
)

__all__ = [
    "block_causal",
    "causal",
    "chunked",
    "from_magi",
    "full",
    "global_keys",
    "image_blocks",
    "shared_prefix",
    "tree",
]

Range = tuple[int, int, int, int, int, int | None, int | None]
Ranges = list[Range]


def causal(cu_seqlens: CuSeqlens, window: int | None = None) -> Ranges:
    """Return causal attention: a query sees itself and the `window` keys before it, or all."""
    low = None if window is None else -as_int("window", window, 0)
    return [(i, 0, n, 0, n, low, 0) for i, n in _documents(cu_seqlens)]


def full(cu_seqlens: CuSeqlens) -> Ranges:
    """Return attention of every query to all keys of its document."""
    return [(i, 0, n, 0, n, None, None) for i, n in _documents(cu_seqlens)]


def chunked(cu_seqlens: CuSeqlens, chunk: int, causal: bool = True) -> Ranges:
    """Return attention within chunks of `chunk` tokens, as in Llama 4: causal there, or full."""
    high = 0 if as_bool("causal", causal) else None
    return [
        (i, first, stop, first, stop, None, high)
        for i, n in _documents(cu_seqlens)
        for first, stop in _cut(n, as_int("chunk", chunk, 1))
    ]


def image_blocks(
    cu_seqlens: CuSeqlens, blocks: Sequence[tuple[int, int, int]], window: int | None = None
) -> Ranges:
    """Return causal attention in which images see themselves whole, as in Gemma 3 and PaliGemma.

    `blocks` are (document, start, stop) of the images; they may touch, and must not overlap. With
    a `window` other queries see so many keys before them, but those of an image all of it.
    """
    found, lengths = causal(cu_seqlens, window), dict(_documents(cu_seqlens))
    for i, block in enumerate(blocks):
        document, start, stop = _block(f"blocks[{i}]", block, lengths)
        found.append((document, start, stop, start, stop, 1, None))
        if window is not None and stop - start > window + 1:
            found.append((document, start, stop, start, stop, None, -window - 1))
    return found


def global_keys(cu_seqlens: CuSeqlens, window: int, keys: int) -> Ranges:
    """Return a causal window with the first `keys` keys of a document for all of its queries.

    So in StreamingLLM, whose attention sinks they are; and causal, as in Longformer. A query sees
    the `window` keys before it, itself, and those first keys that are not behind it.
    """
    window, keys = as_int("window", window, 0), as_int("keys", keys, 0)
    found: Ranges = []
    for i, n in _documents(cu_seqlens):
        first = min(keys, n)
        found += [(i, 0, n, 0, first, None, 0), (i, first, n, first, n, -window, 0)]
    return found


def block_causal(cu_seqlens: CuSeqlens, block: int, window: int | None = None) -> Ranges:
    """Return attention that is causal by blocks, such as the frames of a video.

    A query sees all of its own block of `block` tokens and of those before it; with a `window`, of
    that many blocks before it.
    """
    block = as_int("block", block, 1)
    before = None if window is None else as_int("window", window, 0) * block
    return [
        (i, first, stop, 0 if before is None else max(0, first - before), stop, None, None)
        for i, n in _documents(cu_seqlens)
        for first, stop in _cut(n, block)
    ]


def tree(parents: Sequence[int], lengths: CuSeqlens, document: int = 0) -> Ranges:
    """Return attention in a tree of texts: a token sees what leads to it, from the root on.

    One document has all of them behind one another, in depth-first order: text j, of `lengths[j]`
    tokens, continues text `parents[j]`, or none if that is −1. A token sees its own text causally
    and its ancestors' whole. Positions for RoPE are the caller's: those of siblings are alike.
    """
    over = as_int_array("parents", parents).tolist()
    sizes = as_lengths("lengths", lengths)
    if len(over) != sizes.size:
        raise ValueError(f"parents must be {sizes.size}, one a text, got {len(over)}")
    document = as_int("document", document, 0)
    edges = np.r_[0, np.cumsum(sizes)].tolist()
    found: Ranges = []
    path: list[int] = []  # the texts that lead to the one before

    def close(to: int, end: int) -> None:
        while path and path[-1] != to:
            j = path.pop()
            found.append((document, edges[j], end, edges[j], edges[j + 1], None, 0))

    for j, parent in enumerate(over):
        close(parent, edges[j])
        if parent != -1 and not path:
            reason = "-1, or one of the texts that lead to the text before it"
            raise ValueError(f"parents[{j}] must be {reason} (depth-first order), got {parent}")
        path.append(j)
    close(-1, edges[-1])
    return found


def shared_prefix(prefix: int, branches: CuSeqlens, document: int = 0) -> Ranges:
    """Return attention of several continuations of one text, which do not see each other.

    One document has `prefix` tokens and then the branches, of these lengths: the answers to a
    prompt, or candidates to rank. It is a `tree` of two levels.
    """
    lengths = as_lengths("branches", branches)
    prefix = as_int("prefix", prefix, 0)
    return tree([-1] + [0] * lengths.size, np.r_[prefix, lengths], document)


def from_magi(
    q_ranges: Any, k_ranges: Any, attn_types: Sequence[Any], cu_seqlens: CuSeqlens | None = None
) -> Ranges:
    """Return the mask of MagiAttention's tables of slices.

    `q_ranges` and `k_ranges` are (n, 2): positions start … stop − 1 in the packed batch, as
    `AttnRanges.to_naive_ranges()` gives them. A slice's type is 0 or "full"; 1 or "causal", whose
    diagonal ends in the last query and key; 2 or "inv_causal", which has what is behind a diagonal
    that begins at the first query and key; 3 or "bi_causal", which is both; or their enumeration.
    Without `cu_seqlens` the batch is one document; with them each slice must lie within one.
    """
    edges = [_pairs("q_ranges", q_ranges), _pairs("k_ranges", k_ranges)]
    if not len(edges[0]) == len(edges[1]) == len(attn_types):
        counts = f"{len(edges[0])}, {len(edges[1])} and {len(attn_types)}"
        raise ValueError(f"q_ranges, k_ranges and attn_types must be as many, got {counts}")
    last = max((stop for of_side in edges for _, stop in of_side), default=0)
    cu = parse_cu_seqlens(last if cu_seqlens is None else cu_seqlens)
    found: Ranges = []
    for i, ((q0, q1), (k0, k1), kind) in enumerate(zip(*edges, attn_types, strict=True)):
        if q1 == q0 or k1 == k0:
            continue
        document = int(np.searchsorted(cu, q0, side="right")) - 1
        if document + 1 >= cu.size or not cu[document] <= k0 or max(q1, k1) > cu[document + 1]:
            raise ValueError(f"q_ranges[{i}] and k_ranges[{i}] must lie within one document")
        name = _magi_type(f"attn_types[{i}]", kind)
        low = k0 - q0 if name in ("invcausal", "bicausal") else None
        high = k1 - q1 if name in ("causal", "bicausal") else None
        if low is None or high is None or low <= high:
            first = int(cu[document])
            found.append((document, *(x - first for x in (q0, q1, k0, k1)), low, high))
    return found


_MAGI_TYPES = "full", "causal", "invcausal", "bicausal"


def _magi_type(name: str, kind: Any) -> str:
    """Return the type of one of MagiAttention's slices, or raise a ValueError that names it."""
    kind = getattr(kind, "name", kind)
    if isinstance(kind, str):
        found = kind.lower().replace("_", "")
        if found not in _MAGI_TYPES:
            raise ValueError(f"{name} must be one of {_MAGI_TYPES}, got {shown(kind)}")
        return found
    return _MAGI_TYPES[as_int(name, kind, 0, len(_MAGI_TYPES) - 1)]


def _pairs(name: str, value: Any) -> list[tuple[int, int]]:
    """Return (start, stop) of each, or raise a ValueError that names the argument."""
    starts, stops = (
        as_int_array(name, [pair[side] for pair in value]).tolist() if _are_pairs(value) else [-1]
        for side in range(2)
    )
    if any(not 0 <= start <= stop for start, stop in zip(starts, stops, strict=True)):
        raise ValueError(f"{name} must be pairs 0 <= start <= stop, got {shown(value)}")
    return list(zip(starts, stops, strict=True))


def _are_pairs(value: Any) -> bool:
    """Return whether a value is a list of pairs, or an (n, 2) array."""
    try:
        return all(len(pair) == 2 for pair in value)
    except TypeError:
        return False


def _documents(cu_seqlens: CuSeqlens) -> Iterator[tuple[int, int]]:
    """Yield each document and its length."""
    return enumerate(np.diff(parse_cu_seqlens(cu_seqlens)).tolist())


def _cut(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield where each piece of `size` tokens starts and stops; the last may be shorter."""
    return ((first, min(first + size, length)) for first in range(0, length, size))


def _block(name: str, block: Any, lengths: dict[int, int]) -> tuple[int, int, int]:
    """Return a block within its document, or raise a ValueError that names it."""
    if not isinstance(block, Sequence | np.ndarray | Tensor) or len(block) != 3:
        raise ValueError(f"{name} must be (document, start, stop), got {shown(block)}")
    document, start, stop = (as_int(name, x, 0) for x in block)
    if document not in lengths:
        raise ValueError(f"{name} must be of one of {len(lengths)} documents, got {document}")
    if not start <= stop <= lengths[document]:
        expected = f"within document {document}, which has {lengths[document]} tokens"
        raise ValueError(f"{name} must lie {expected}, got {start} to {stop}")
    return document, start, stop
