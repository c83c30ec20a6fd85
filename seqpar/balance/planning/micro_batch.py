"""MicroBatch: documents that all ranks compute together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.costs.grid import Floats
from seqpar.layout.cuts.cut import Spans
from seqpar.layout.handle import LayoutCut, decode, encode
from seqpar.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Documents that all ranks compute together.

    Attributes:
        documents: (n,) indices into the planned lengths, in the layout's order.
        lengths: (n,) the number of tokens of each document.
        cut: the spans of documents that each rank holds.
        seconds: (ranks,) predicted seconds of a forward and a backward pass.
        tokens: (ranks,) the number of tokens that each rank holds.
        bytes: (ranks,) the bytes that each rank sends in forward and backward of all layers.
        offload: (ranks,) the fraction of each rank's activations that must be copied to host memory
            so that the rank's tokens fit. Each rank passes its own fraction to `seqpar.offload`.
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
        """The layout of these documents, for attention; created on first use."""
        return Layout(np.r_[0, np.cumsum(self.lengths)], self.cut)

    @classmethod
    def empty(cls, ranks: int) -> MicroBatch:
        none, zeros = np.zeros(0, np.int64), np.zeros(ranks)
        cut = Spans.of(ranks, none, none, none, none)
        return cls(none, none, cut, zeros, zeros.astype(np.int64), zeros, zeros)

    def check(self, ranks: int) -> None:
        """Raise a ValueError that names an attribute unless it has one entry per rank."""
        for name in ("seconds", "tokens", "bytes", "offload"):
            if (shape := getattr(self, name).shape) != (ranks,):
                expected = f"an entry for each of {ranks} ranks"
                raise ValueError(f"{name} must have {expected}, got {shape}")

    def as_dict(self) -> dict[str, list[float]]:
        """Return the fields as plain numbers and lists, for JSON."""
        arrays = {name: getattr(self, name) for name in (*_INTS, *_FLOATS)}
        arrays["cut"] = encode(self.cut)
        return {name: array.tolist() for name, array in arrays.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> MicroBatch:
        """Return the micro-batch from which `as_dict` made these values.

        Raises a KeyError if a field is missing, and a ValueError that names a wrong field.
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
