"""MicroBatch: documents that all ranks compute together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats
from seqpar.layout.cuts.cuts import Spans
from seqpar.layout.layout import Layout
from seqpar.layout.serialize import LayoutCut, decode, encode


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Documents that all ranks compute together.

    Attributes:
        documents: (n,) indices into the lengths that were planned, in the layout's order.
        lengths: (n,) tokens of each.
        cut: which spans of them each rank holds.
        seconds: (ranks,) predicted seconds of a forward and a backward.
        tokens: (ranks,) tokens held.
        bytes: (ranks,) bytes sent in forward and backward, of all layers.
        offload: (ranks,) the share of its activations that each copies to host memory, to hold its
            tokens: `seqpar.offload` is called with it.
    """

    documents: Ints
    lengths: Ints
    cut: LayoutCut
    seconds: Floats
    tokens: Ints
    bytes: Floats
    offload: Floats

    @cached_property
    def layout(self) -> Layout:
        """The layout of these documents, for attention; it is made when it is asked for."""
        return Layout(np.r_[0, np.cumsum(self.lengths)], self.cut)

    @classmethod
    def empty(cls, ranks: int) -> MicroBatch:
        """Return a micro-batch without documents."""
        none, zeros = np.zeros(0, np.int64), np.zeros(ranks)
        cut = Spans.of(ranks, none, none, none, none)
        return cls(none, none, cut, zeros, zeros.astype(np.int64), zeros, zeros)

    def check(self, ranks: int) -> None:
        """Raise a ValueError that names an attribute which does not have an entry for each rank."""
        for name in ("seconds", "tokens", "bytes", "offload"):
            if getattr(self, name).shape != (ranks,):
                found = getattr(self, name).shape
                raise ValueError(
                    f"{name} must have an entry for each of {ranks} ranks, got {found}"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers and lists, for JSON; the cut as integers."""
        arrays = {name: getattr(self, name) for name in (*_INTS, *_FLOATS)}
        arrays["cut"] = encode(self.cut)
        return {name: array.tolist() for name, array in arrays.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MicroBatch:
        """Make a micro-batch from what `as_dict` returned.

        Raise a KeyError if a field is missing, and a ValueError that names one which is wrong.
        """
        fields: dict[str, Any] = {}
        for name in (*_INTS, *_FLOATS, "cut"):
            value = values[name]
            try:
                array: Any = np.array(value, np.float64 if name in _FLOATS else np.int64)
                fields[name] = decode(array) if name == "cut" else array
            except (TypeError, ValueError, IndexError, OverflowError) as error:
                raise ValueError(f"{name} is damaged: {error}") from None
        return cls(**fields)


_INTS, _FLOATS = ("documents", "lengths", "tokens"), ("seconds", "bytes", "offload")
