"""Layouts of the tokens that Megatron distributes to the ranks of a context-parallel group.

Megatron cuts each sequence into 2P equal chunks for P ranks. Rank r holds chunks r and 2P − 1 − r.
"""

from __future__ import annotations

from functools import lru_cache
from operator import is_
from typing import Any

import numpy as np

from seqpar.core.arguments import Ints, parse_cu_seqlens, shown
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import version_of
from seqpar.integrations.dealt_chunks import head_and_tail, layout_of_chunks
from seqpar.layout.layout import Layout

_KEY = "_seqpar_layout"  # attribute of PackedSeqParams that holds the layout
_FIELDS = "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"
_MAX_LAYOUTS = 8  # of batches without packed sequences, which differ only in their length


@lru_cache(_MAX_LAYOUTS)
def layout_of_rows(tokens: int, ranks: int) -> Layout:
    """Return the layout of rows without documents. Each rank holds `tokens` tokens of each row."""
    if ranks > 1 and tokens % 2:
        expected = f"a multiple of {2 * ranks}, two chunks for each rank of the context-parallel"
        raise ValueError(f"seq_length must be {expected} group, got {tokens * ranks}")
    return Layout.zigzag(tokens * ranks, ranks)


@outside_graphs
def layout_of_packed(
    packed: Any, rows: tuple[int, int], ranks: int, per_sequence_balancing: bool
) -> Layout:
    """Return the layout of packed sequences, in which the padding behind each document is a
    separate document.

    The layout is stored in `packed`, and returned by later calls.

    Args:
        packed: Megatron's PackedSeqParams.
        rows: (number of rows, tokens per row) of the tokens that this rank holds.
        ranks: the number of ranks of the context-parallel group.
        per_sequence_balancing: whether Megatron cut each row into chunks, rather than each
            document.
    """
    given = [getattr(packed, name) for name in _FIELDS]
    versions = [None if x is None else version_of(x) for x in given]
    key = rows, ranks, per_sequence_balancing, versions
    kept: tuple[list[Any], Any, Layout] | None = getattr(packed, _KEY, None)
    if kept is not None and kept[1] == key and all(map(is_, kept[0], given)):
        return kept[2]
    layout = _layout(packed, rows, ranks, per_sequence_balancing)
    # The entry keeps the tensors alive, because a new tensor can have the same id as a freed one.
    setattr(packed, _KEY, (given, key, layout))
    return layout


def _layout(packed: Any, rows: tuple[int, int], ranks: int, per_sequence_balancing: bool) -> Layout:
    documents, edges = _documents(packed)
    tokens = rows[0] * rows[1] * ranks
    if documents[-1] != tokens:
        expected = f"{tokens} tokens, {rows[0] * rows[1]} on each of {ranks} ranks"
        raise ValueError(f"cu_seqlens_q must end at {expected}, got {documents[-1]}")
    if packed.qkv_format != "thd":
        row = rows[1] * ranks
        dealt, name, unit = np.arange(0, tokens + 1, row), "seq_length", "rows"
        if (missing := np.setdiff1d(dealt, edges)).size:
            expected = f"an entry at the start of each row of {row} tokens"
            raise ValueError(f"cu_seqlens_q must have {expected}, got none at {missing[0]}")
    elif per_sequence_balancing:
        dealt, name, unit = np.array([0, tokens]), "cu_seqlens_q", "packs"
    else:
        dealt, name, unit = documents, "cu_seqlens_q", "documents"
    uneven = np.diff(dealt) % (2 * ranks)
    if ranks > 1 and uneven.any():
        i = int(np.argmax(uneven > 0))
        expected = f"{unit} of a multiple of {2 * ranks} tokens, two chunks for each rank"
        way_out = ": pad the documents, or pass qkv_format='sbhd'" if unit == "documents" else ""
        found = f"{dealt[i + 1] - dealt[i]} tokens in {unit[:-1]} {i}"
        raise ValueError(f"{name} must have {expected}, got {found}{way_out}")
    if ranks == 1:
        return Layout.contiguous(edges, 1)
    if np.array_equal(dealt, edges):
        return Layout.zigzag(edges, ranks)
    steps = np.arange(2 * ranks) * (np.diff(dealt)[:, None] // (2 * ranks))
    chunks = np.r_[(dealt[:-1, None] + steps).ravel(), tokens]
    return layout_of_chunks(chunks, head_and_tail(ranks), ranks, edges)


def _documents(packed: Any) -> tuple[Ints, Ints]:
    """Return two arrays of offsets. In the first array, the padding behind a document belongs to
    the document. In the second array, the padding is a separate document.
    """
    real, keys, padded, padded_keys = (
        None if x is None else parse_cu_seqlens(x, f"packed_seq_params.{name}")
        for name, x in ((name, getattr(packed, name)) for name in _FIELDS)
    )
    if real is None:
        raise ValueError("packed_seq_params.cu_seqlens_q must be given, got None")
    for name, x, other in (
        ("cu_seqlens_kv", real, keys),
        ("cu_seqlens_kv_padded", padded, padded_keys),
    ):
        if other is not None and not np.array_equal(x, other):  # type: ignore[arg-type]
            same = name.replace("kv", "q")
            raise ValueError(
                f"packed_seq_params.{name} must be equal to {same}, got {shown(other)}"
            )
    if padded is None:
        documents = np.unique(real)
        return documents, documents
    lengths = np.diff(real)
    if padded.size != real.size or (lengths > np.diff(padded)).any():
        expected = "room for each document of cu_seqlens_q"
        found = f"got {shown(padded)} for {shown(real)}"
        raise ValueError(f"packed_seq_params.cu_seqlens_q_padded must have {expected}, {found}")
    return np.unique(padded), np.union1d(padded, padded[:-1] + lengths)
