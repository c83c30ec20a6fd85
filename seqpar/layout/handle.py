"""Pass a geometry through an operator as a tensor.

An operator takes tensors, numbers and strings, but no Python objects. A handle is a 1-D int64
tensor on the CPU with all that determines a geometry: its documents and its cut, behind a digest of
them. A compiled graph takes it as data: the graph neither specialises on a layout nor recompiles
for the next one. A copy of a handle, whatever made it and in whatever process, is as good.

Lifetime: a table finds geometries by digest and holds them weakly, so equal layouts share one. A
handle's storage is a numpy array that refers to its geometry, so whatever keeps the tensor (a
Layout, an autograd context, the saved tensors of a compiled graph) keeps the geometry, with all
that was derived from it. Where only copies are left, it is made again from what they hold.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.arguments import Ints
from seqpar.layout.cuts import LayoutCut, decode, encode
from seqpar.layout.geometry import Geometry

_DIGEST = 4  # words
_by_digest: weakref.WeakValueDictionary[bytes, Geometry] = weakref.WeakValueDictionary()


class _OwningArray(np.ndarray[Any, Any]):
    """An array that keeps a geometry alive."""

    geometry: Geometry


def make_handle(cu_seqlens: Ints, cut: LayoutCut) -> tuple[Geometry, Tensor]:
    """Return the geometry of these documents and this cut, and a tensor that determines it."""
    content = np.concatenate([[cu_seqlens.size], cu_seqlens, encode(cut)])
    words = np.concatenate([_digest(content), content])
    geometry = _by_digest.get(_key(words)) or _decode(words)
    array = words.view(_OwningArray)
    array.geometry = geometry
    with torch.inference_mode(False):  # autograd could not save it otherwise
        handle = torch.from_numpy(array)
    _mark_length_dynamic(handle)
    return geometry, handle


def from_handle(handle: Tensor) -> Geometry:
    """Return the geometry that a handle, or a copy of one, determines.

    Raises a ValueError if it is no handle, or was changed.
    """
    words = (handle if handle.is_cpu else handle.cpu()).numpy()
    geometry = _by_digest.get(_key(words))
    if geometry is None:
        geometry = _decode(words)
        handle.geometry = geometry  # type: ignore[attr-defined]  # for as long as this copy lives
    return geometry


def _decode(words: Ints) -> Geometry:
    content = words[_DIGEST:]
    if words.dtype != np.int64 or words.ndim != 1 or _digest(content).tobytes() != _key(words):
        raise ValueError("layout: the tensor that describes it was changed since it was made")
    stop = 1 + int(content[0])
    geometry = Geometry(content[1:stop], decode(content[stop:]))
    return _by_digest.setdefault(_key(words), geometry)


def _digest(content: Ints) -> Ints:
    sha = hashlib.sha256(content.astype("<i8", copy=False).tobytes())
    return np.frombuffer(sha.digest(), dtype=np.int64)


def _key(words: Ints) -> bytes:
    return words[:_DIGEST].tobytes()


def _mark_length_dynamic(handle: Tensor) -> None:
    """Let torch.compile, where it is in use, take handles of any length from the first call on."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.maybe_mark_dynamic(handle, 0)
