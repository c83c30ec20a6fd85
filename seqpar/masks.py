"""Common masks as lists of ranges, for `seqpar.Mask.of_ranges`.

Each function returns a list of (document, q_start, q_stop, k_start, k_stop, low, high). Positions
count from the start of the document. To give the documents of a packed batch different masks, call
several functions, select each document's ranges from one of the results, and join the selected
ranges with `+`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import numpy as np

from seqpar.core.arguments import (
    CuSeqlens,
    as_bool,
    as_int,
    as_int_array,
    as_lengths,
    as_sequence,
    parse_cu_seqlens,
    shown,
)
from seqpar.core.compiling import outside_graphs

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


@outside_graphs
def causal(cu_seqlens: CuSeqlens, window: int | None = None) -> Ranges:
    """Return a causal mask. A query attends to itself and to all keys before it, or to itself and
    to the `window` keys before it.
    """
    low = None if window is None else -as_int("window", window, 0)
    return [(i, 0, n, 0, n, low, 0) for i, n in _documents(cu_seqlens)]


@outside_graphs
def full(cu_seqlens: CuSeqlens) -> Ranges:
    """Return a mask in which every query attends to all keys of its document."""
    return [(i, 0, n, 0, n, None, None) for i, n in _documents(cu_seqlens)]


@outside_graphs
def chunked(cu_seqlens: CuSeqlens, chunk: int, causal: bool = True) -> Ranges:
    """Return a mask of chunks of `chunk` tokens. It is causal or full within each chunk, as in
    Llama 4.
    """
    high = 0 if as_bool("causal", causal) else None
    return [
        (i, first, stop, first, stop, None, high)
        for i, n in _documents(cu_seqlens)
        for first, stop in _cut(n, as_int("chunk", chunk, 1))
    ]


@outside_graphs
def image_blocks(
    cu_seqlens: CuSeqlens, blocks: Sequence[tuple[int, int, int]], window: int | None = None
) -> Ranges:
    """Return a causal mask in which each image is fully visible to itself (Gemma 3, PaliGemma).

    `blocks` are (document, start, stop) of the images. They can be adjacent, but must not overlap.
    With a `window`, a query attends only to this number of keys before itself. A query in an image
    also attends to the whole image.
    """
    ranges, lengths = causal(cu_seqlens, window), dict(_documents(cu_seqlens))
    for i, block in enumerate(as_sequence("blocks", blocks, "(document, start, stop)")):
        document, start, stop = _block(f"blocks[{i}]", block, lengths)
        ranges.append((document, start, stop, start, stop, 1, None))
        if window is not None and stop - start > window + 1:
            ranges.append((document, start, stop, start, stop, None, -window - 1))
    return ranges


@outside_graphs
def global_keys(cu_seqlens: CuSeqlens, window: int, keys: int) -> Ranges:
    """Return a causal mask with a window that also shows the first `keys` keys of each document.

    These keys are StreamingLLM's attention sinks, or the global tokens of a causal Longformer. A
    query attends to itself, the `window` keys before it, and the first keys up to its own position.
    """
    window, keys = as_int("window", window, 0), as_int("keys", keys, 0)
    ranges: Ranges = []
    for i, n in _documents(cu_seqlens):
        first = min(keys, n)
        ranges += [(i, 0, n, 0, first, None, 0), (i, first, n, first, n, -window, 0)]
    return ranges


@outside_graphs
def block_causal(cu_seqlens: CuSeqlens, block: int, window: int | None = None) -> Ranges:
    """Return a mask that is causal between blocks, such as the frames of a video.

    A query attends to its whole block of `block` tokens and to all earlier blocks or, with a
    `window`, to the last `window` blocks before its own.
    """
    block = as_int("block", block, 1)
    before = None if window is None else as_int("window", window, 0) * block
    return [
        (i, first, stop, 0 if before is None else max(0, first - before), stop, None, None)
        for i, n in _documents(cu_seqlens)
        for first, stop in _cut(n, block)
    ]


@outside_graphs
def tree(parents: Sequence[int], lengths: CuSeqlens, document: int = 0) -> Ranges:
    """Return the mask of a tree of texts, each of which continues its parent.

    All texts are in one document, in depth-first order. Text j has `lengths[j]` tokens. It
    continues text `parents[j]`, or starts a tree if `parents[j]` is −1. A token attends causally to
    its own text, and to all tokens of the text's ancestors. You must compute positions for RoPE
    yourself, because siblings have the same positions.
    """
    parent_texts = as_int_array("parents", parents).tolist()
    sizes = as_lengths("lengths", lengths)
    if len(parent_texts) != sizes.size:
        raise ValueError(
            f"parents must have {sizes.size} entries, one per text, got {len(parent_texts)}"
        )
    document = as_int("document", document, 0)
    edges = np.r_[0, np.cumsum(sizes)].tolist()
    ranges: Ranges = []
    path: list[int] = []  # the texts from the root to the previous text

    def close(to: int, end: int) -> None:
        while path and path[-1] != to:
            j = path.pop()
            ranges.append((document, edges[j], end, edges[j], edges[j + 1], None, 0))

    for j, parent in enumerate(parent_texts):
        close(parent, edges[j])
        if parent != -1 and not path:
            expected = "-1, the text before, or one of its ancestors"
            raise ValueError(f"parents[{j}] must be {expected} (depth-first order), got {parent}")
        path.append(j)
    close(-1, edges[-1])
    return ranges


@outside_graphs
def shared_prefix(prefix: int, branches: CuSeqlens, document: int = 0) -> Ranges:
    """Return the mask of several continuations of one text that do not attend to each other.

    The document has `prefix` tokens, followed by branches of these lengths, such as answers to a
    prompt. The mask is that of a `tree` with two levels.
    """
    lengths = as_lengths("branches", branches)
    prefix = as_int("prefix", prefix, 0)
    return tree([-1] + [0] * lengths.size, np.r_[prefix, lengths], document)


@outside_graphs
def from_magi(
    q_ranges: Any, k_ranges: Any, attn_types: Sequence[object], cu_seqlens: CuSeqlens | None = None
) -> Ranges:
    """Return the mask of MagiAttention's tables of slices.

    `q_ranges` and `k_ranges` are (n, 2): for each slice, (start, stop) in the packed batch, as
    `AttnRanges.to_naive_ranges()` returns them. Without `cu_seqlens`, the batch is one document.
    With `cu_seqlens`, each slice must lie within one document. The type of a slice is a number, a
    name, or a member of MagiAttention's enumeration:

    - 0, "full": all pairs.
    - 1, "causal": keys up to a diagonal. The diagonal ends at the last query and key.
    - 2, "inv_causal": keys from a diagonal on. The diagonal begins at the first query and key.
    - 3, "bi_causal": keys between these two diagonals.
    """
    edges = [_pairs("q_ranges", q_ranges), _pairs("k_ranges", k_ranges)]
    attn_types = as_sequence("attn_types", attn_types, "types of attention")
    if not len(edges[0]) == len(edges[1]) == len(attn_types):
        counts = f"{len(edges[0])}, {len(edges[1])} and {len(attn_types)}"
        raise ValueError(f"q_ranges, k_ranges and attn_types must be equally long, got {counts}")
    last = max((stop for pairs in edges for _, stop in pairs), default=0)
    cu = parse_cu_seqlens(last if cu_seqlens is None else cu_seqlens)
    ranges: Ranges = []
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
            ranges.append((document, *(x - first for x in (q0, q1, k0, k1)), low, high))
    return ranges


_MAGI_TYPES = "full", "causal", "invcausal", "bicausal"


def _magi_type(name: str, kind: object) -> str:
    kind = kind.name if isinstance(kind, Enum) else kind
    if isinstance(kind, str):
        plain = kind.lower().replace("_", "")
        if plain not in _MAGI_TYPES:
            raise ValueError(f"{name} must be one of {_MAGI_TYPES}, got {shown(kind)}")
        return plain
    return _MAGI_TYPES[as_int(name, kind, 0, len(_MAGI_TYPES) - 1)]


def _pairs(name: str, value: Any) -> list[tuple[int, int]]:
    starts, stops = (
        as_int_array(name, [pair[side] for pair in value]).tolist() if _are_pairs(value) else [-1]
        for side in range(2)
    )
    if any(not 0 <= start <= stop for start, stop in zip(starts, stops, strict=True)):
        raise ValueError(f"{name} must be pairs 0 <= start <= stop, got {shown(value)}")
    return list(zip(starts, stops, strict=True))


def _are_pairs(value: Any) -> bool:
    try:
        return all(len(pair) == 2 for pair in value)
    except TypeError:
        return False


def _documents(cu_seqlens: CuSeqlens) -> Iterator[tuple[int, int]]:
    return enumerate(np.diff(parse_cu_seqlens(cu_seqlens)).tolist())


def _cut(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive ranges of `size` tokens. The last range can be shorter."""
    return ((first, min(first + size, length)) for first in range(0, length, size))


def _block(name: str, block: object, lengths: dict[int, int]) -> tuple[int, int, int]:
    numbers = as_sequence(name, block, "document, start and stop")
    if len(numbers) != 3:
        raise ValueError(f"{name} must be (document, start, stop), got {shown(block)}")
    document, start, stop = (as_int(name, x, 0) for x in numbers)
    if document not in lengths:
        raise ValueError(f"{name} must be of one of {len(lengths)} documents, got {document}")
    if not start <= stop <= lengths[document]:
        expected = f"within document {document}, which has {lengths[document]} tokens"
        raise ValueError(f"{name} must lie {expected}, got {start} to {stop}")
    return document, start, stop
