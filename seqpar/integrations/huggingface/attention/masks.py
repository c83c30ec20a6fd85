"""Translate transformers' mask functions into the masks of seqpar."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seqpar.integrations.huggingface.batch.documents import BatchDocuments
from seqpar.integrations.mask_functions import ranges_within
from seqpar.layout.masks.mask import Mask


@dataclass(frozen=True)
class MaskShape:
    """The keys that a query attends to within its document; `ranges` replaces all other fields.

    `left` and `right` are the sizes of a window, −1 without limit. `chunk` cuts documents into
    chunks of that many tokens, which do not attend to each other.
    """

    causal: bool = False
    left: int = -1
    right: int = -1
    chunk: int | None = None
    ranges: Mask | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the mask arguments of an attention call. Chunks are part of the layout instead."""
        if self.ranges is not None:
            return {"mask": self.ranges}
        return {"causal": self.causal, "window_size": (self.left, self.right)}

    def __and__(self, other: MaskShape) -> MaskShape:
        if self.ranges is not None or other.ranges is not None:
            raise ValueError("it is a union, within another mask")
        if self.chunk and other.chunk and self.chunk != other.chunk:
            raise ValueError(f"it cuts chunks of {self.chunk} and of {other.chunk} tokens")
        return MaskShape(
            self.causal or other.causal,
            _narrower(self.left, other.left),
            _narrower(self.right, other.right),
            self.chunk or other.chunk,
        )


def _narrower(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def read_mask(function: Callable[..., Any], documents: BatchDocuments | None = None) -> MaskShape:
    """Return the shape of a mask function of `transformers.masking_utils`, without documents.

    For a whole batch with these `documents`, unions are allowed too, such as images that attend to
    themselves. Raises a ValueError that names the part that cannot be expressed.
    """
    try:
        return _read(function)
    except ValueError:
        if documents is None:
            raise
    return MaskShape(ranges=Mask.of_ranges(ranges_within(function, documents.squares())))


def is_packed(function: Callable[..., Any]) -> bool:
    """Return whether a mask function separates documents that the model found in position ids."""
    if getattr(function, "__qualname__", "").startswith("packed_sequence_mask_function"):
        return True
    within = inspect.getclosurevars(function).nonlocals
    return any(map(is_packed, within.get("mask_functions", ())))


def _read(function: Callable[..., Any]) -> MaskShape:
    name = getattr(function, "__qualname__", repr(function)).split(".")[0]
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        raise ValueError(f"the mask has the function {name}, which is not transformers' own")
    within = inspect.getclosurevars(function).nonlocals
    if name in ("bidirectional_mask_function", "packed_sequence_mask_function"):
        return MaskShape()
    if name == "causal_mask_function":
        return MaskShape(causal=True)
    if name == "sliding_window_overlay":
        return MaskShape(left=int(within["sliding_window"]) - 1)
    if name == "sliding_window_bidirectional_overlay":
        window = int(within["sliding_window"])
        return MaskShape(left=window, right=window)
    if name == "chunked_overlay":
        return MaskShape(chunk=int(within["chunk_size"]))
    if name == "remap_positions_for_packed_sequence":
        return _read(within["mask_function"])
    if name == "and_masks":
        shape = MaskShape()
        for part in within["mask_functions"]:
            shape = shape & _read(part)
        return shape
    if name == "or_masks":
        parts = [getattr(part, "__qualname__", repr(part)) for part in within["mask_functions"]]
        names = ", ".join(part.split(".")[0] for part in parts)
        raise ValueError(f"the mask is a union, of {names}")
    raise ValueError(f"the mask has {name}")
