"""Handles: tensors that stand for layouts, because torch operators accept tensors but no layouts.

A *handle* is a 1-D int64 tensor on the CPU. It contains a digest of the layout, the documents, and
the rule that assigns tokens to ranks. A compiled graph treats the handle as data, so a new layout
does not cause a recompilation.

A *geometry* is the content of a layout as arrays (`geometry.py`). Equal layouts of a process share
one geometry, which is found by the digest. An object that keeps a handle alive, such as a Layout or
a saved tensor of autograd, also keeps the geometry alive. If only a copy of the handle is left, the
geometry is made again from the content of the copy, in any process.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import astuple
from functools import partial
from typing import NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.torch_private import mark_dynamic, never_compiled
from seqpar.layout.cuts.contiguous import Contiguous
from seqpar.layout.cuts.cut import Counts, Spans
from seqpar.layout.cuts.fixed_chunks import FixedChunks
from seqpar.layout.cuts.striped import EvenStripes, Striped
from seqpar.layout.cuts.zigzag import EvenZigzag, Zigzag
from seqpar.layout.geometry import Geometry

# Append new kinds at the end, because the integers of a cut contain the index of its kind.
LayoutCut = Contiguous | Zigzag | Striped | Spans | EvenZigzag | EvenStripes | FixedChunks
_KINDS = get_args(LayoutCut)

_DIGEST_WORDS = 4  # integers in the digest, at the start of a handle
# torch.compile specialises on the sizes 0 and 1, and on sizes that are equal. A different multiple
# of this number is therefore added to each size.
_SIZE_STRIDE = 2**42
_by_digest: weakref.WeakValueDictionary[bytes, Geometry] = weakref.WeakValueDictionary()


class _OwningArray(np.ndarray[tuple[int], np.dtype[np.int64]]):
    geometry: Geometry


def make_handle(cu_seqlens: Ints, cut: LayoutCut) -> tuple[Geometry, Tensor]:
    """Return the geometry of these documents and this cut, and its handle."""
    words = with_digest(np.concatenate([[cu_seqlens.size], cu_seqlens, encode(cut)]))
    geometry = _by_digest.get(key_of(words)) or _decode(words)
    array = words.view(_OwningArray)
    array.geometry = geometry
    handle = as_tensor(array)
    handle.mark = _mark_of(words)  # type: ignore[attr-defined]
    return geometry, handle


def _mark_of(words: Ints) -> Tensor:
    """Return an empty tensor whose shape depends on the content of a handle.

    A handle is a tensor that stands for a layout. When torch recomputes a checkpoint, it compares
    the shapes of saved tensors, but not their content. With this tensor, torch notices if the
    recomputation has a different layout.
    """
    with torch.inference_mode(False):
        return torch.empty_strided([0, 2 + int(words[0]) % 2**40], [0, 0])


def as_tensor(words: Ints) -> Tensor:
    with torch.inference_mode(False):  # otherwise autograd could not save the tensor
        handle = torch.from_numpy(words)
    mark_dynamic(handle, 0)
    return handle


class Sizes(NamedTuple):
    """The sizes of a rank from which torch.compile infers shapes."""

    tokens_before: int  # tokens on all lower ranks together
    documents: int  # documents of the layout
    padding: int  # padding tokens at the end of the layout
    spans: int
    runs: int
    continued: int  # spans that do not begin at the start of their document


def make_sizes(documents: int, padding: int, counts: Counts) -> list[Tensor]:
    """Return P + 1 empty tensors for P ranks. The shape of tensor c encodes the `Sizes` of rank
    c.
    """
    # torch.compile treats shapes as data, but recompiles if an integer attribute of a module
    # changes.
    before = np.r_[0, np.cumsum(counts.tokens)].tolist()
    held = [[*column.tolist(), 0] for column in (counts.spans, counts.runs, counts.continued)]
    tensors, strides = [], [0] * (1 + len(Sizes._fields))
    with torch.inference_mode(False):
        for first, *of_rank in zip(before, *held, strict=True):
            sizes = Sizes(first, documents, padding, *of_rank)
            shape = [0, *(size + i * _SIZE_STRIDE for i, size in enumerate(sizes, 1))]
            tensors.append(torch.empty_strided(shape, strides, device="cpu"))
            mark_dynamic(tensors[-1], *range(1, len(shape)))
    return tensors


def sizes_of(tensor: Tensor) -> Sizes:
    return Sizes(*(size - i * _SIZE_STRIDE for i, size in enumerate(tensor.shape[1:], 1)))


def from_handle(handle: Tensor) -> Geometry:
    """Return the geometry of a handle, or of a copy of a handle.

    Raise a ValueError if the content of the handle was changed.
    """
    words = words_of(handle)
    geometry = _by_digest.get(key_of(words))
    if geometry is None:
        geometry = _decode(words)
        handle.geometry = geometry  # type: ignore[attr-defined]  # for as long as this copy lives
    return geometry


def described(handle: Tensor, canonical: bool) -> object:
    """Return a value by which ranks compare their layouts.

    With `canonical`, the value is a text for errors. If two layouts assign the same tokens to each
    rank, their texts are the same, even if the layouts were made in different ways. Making the text
    may take seconds.
    """
    if canonical:
        return from_handle(handle).described()
    return key_of(handle.numpy()).hex()[:16]


def _decode(words: Ints) -> Geometry:
    error = "layout: code has changed the tensor that describes the layout"
    content = content_of(words, error)
    stop = 1 + int(content[0])
    geometry = Geometry(content[1:stop], decode(content[stop:]))
    return _by_digest.setdefault(key_of(words), geometry)


def with_digest(content: Ints) -> Ints:
    sha = hashlib.sha256(content.astype("<i8", copy=False).tobytes())
    return np.concatenate([np.frombuffer(sha.digest(), dtype=np.int64), content])


def content_of(words: Ints, error: str) -> Ints:
    """Return the part of a handle after the digest.

    If the handle was changed, raise a ValueError with the text `error`.
    """
    content = words[_DIGEST_WORDS:]
    wrong = words.dtype != np.int64 or words.ndim != 1
    if wrong or key_of(with_digest(content)) != key_of(words):
        raise ValueError(error)
    return content


def words_of(handle: Tensor) -> Ints:
    return (handle if handle.is_cpu else handle.cpu()).numpy()


def key_of(words: Ints) -> bytes:
    """Return the digest of a handle, which is the handle's key in the tables of geometries and
    masks.
    """
    return words[:_DIGEST_WORDS].tobytes()


def encode(cut: LayoutCut) -> Ints:
    """Return a cut as integers: the index of its kind, then its fields."""
    kind = _KINDS.index(type(cut))
    if isinstance(cut, Spans):
        return np.concatenate([[kind, cut.ranks], *astuple(cut)])
    if isinstance(cut, FixedChunks):
        whole = encode(cast(LayoutCut, cut.whole))
        return np.concatenate([[kind, cut.size, cut.documents.size], cut.documents, whole])
    return np.array([kind, *astuple(cut)], dtype=np.int64)


def decode(code: Ints) -> LayoutCut:
    kind = _KINDS[code[0]]
    if kind is Spans:
        edges, table = np.split(code[2:], [int(code[1]) + 1])
        return Spans(edges, *table.reshape(3, -1))
    if kind is FixedChunks:
        documents, whole = np.split(code[3:], [int(code[2])])
        return FixedChunks(decode(whole), documents, int(code[1]))
    return kind(*code[1:].tolist())


def read_indices(name: str, geometry: Geometry, rank: int) -> Tensor:
    """Return the indices or positions of a rank's tokens, (T_local,) int64.

    `name` is "token_indices" or "position_ids".
    """
    if name == "token_indices":
        return torch.from_numpy(geometry.token_indices(rank))
    return torch.from_numpy(geometry.holdings[rank].positions.astype(np.int64))


@never_compiled
def _read_on_cpu(name: str, layout: Tensor, rank: int, tokens: int) -> Tensor:
    return read_indices(name, from_handle(layout), rank)


def _fake(layout: Tensor, rank: int, tokens: int) -> Tensor:
    return layout.new_empty((tokens,))


# Operators that read handles, for torch.compile.
for _name in ("token_indices", "position_ids"):
    _operator = f"seqpar::{_name}"
    torch.library.define(_operator, "(Tensor layout, int rank, SymInt tokens) -> Tensor")
    torch.library.impl(_operator, "cpu", partial(_read_on_cpu, _name))
    torch.library.register_fake(_operator, _fake)
