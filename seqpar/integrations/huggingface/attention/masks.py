"""Translate transformers' mask functions into the masks of seqpar."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from seqpar.integrations.huggingface.batch.documents import BatchDocuments
from seqpar.integrations.mask_functions import ranges_within
from seqpar.layout.masks.mask import Mask

# The mask function that compares a tensor of document numbers.
_PACKED = "packed_sequence_mask_function"
_REMAP = "remap_positions_for_packed_sequence"  # the mask function within these documents


@dataclass(frozen=True)
class MaskShape:
    """Which keys of its document a query attends to."""

    causal: bool = False
    left: int = -1  # the number of earlier keys in a window; −1 is unlimited
    right: int = -1
    chunk: int | None = None  # the length of chunks, which do not attend to each other
    ranges: Mask | None = None  # if given, the other fields are not used

    def arguments(self) -> dict[str, Any]:
        """Return the mask arguments of an attention call."""
        if self.ranges is not None:
            return {"mask": self.ranges}
        return {"causal": self.causal, "window_size": (self.left, self.right)}

    def __and__(self, other: MaskShape) -> MaskShape:
        if self.ranges is not None or other.ranges is not None:
            raise ValueError("the mask intersects a union of masks with a mask")
        if self.chunk and other.chunk and self.chunk != other.chunk:
            raise ValueError(f"the mask cuts chunks of {self.chunk} and of {other.chunk} tokens")
        return MaskShape(
            self.causal or other.causal,
            _narrower(self.left, other.left),
            _narrower(self.right, other.right),
            self.chunk or other.chunk,
        )


def _narrower(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def read_mask(
    function: Callable[..., Any],
    documents: BatchDocuments | None = None,
    position_ids: Tensor | None = None,
) -> MaskShape:
    """Convert a mask function of `transformers.masking_utils` to a mask of seqpar. The separation
    of documents is not part of the result.

    If the function separates documents, its documents must begin where this rank's `position_ids`
    jump. If the `documents` of a whole batch are given, the function can be a union of masks, such
    as a causal mask for text and a full mask within each image. Raises a ValueError if the mask
    cannot be expressed.
    """
    _check_documents(function, position_ids)
    try:
        return _read(function)
    except ValueError:
        if documents is None:
            raise
    return MaskShape(ranges=Mask.of_ranges(ranges_within(function, documents.squares())))


def is_packed(function: Callable[..., Any]) -> bool:
    """Return whether a mask function separates documents that the model found in position ids."""
    if getattr(function, "__qualname__", "").startswith(_PACKED):
        return True
    within = inspect.getclosurevars(function).nonlocals
    return any(map(is_packed, within.get("mask_functions", ())))


def _check_documents(function: Callable[..., Any], position_ids: Tensor | None) -> None:
    """Raise a ValueError if a mask function separates documents by a tensor other than the
    positions.

    Up to transformers 5.18, the mask function reads a tensor of document numbers, which is compared
    with the positions. Later versions have a separate mask function for documents that are found
    from positions.
    """
    functions = inspect.getclosurevars(function).nonlocals.get("mask_functions", ())
    names = set(map(_name, functions))
    if _PACKED in names and _REMAP not in names:
        (packed,) = (x for x in functions if _name(x) == _PACKED)
        given = inspect.getclosurevars(packed).nonlocals["packed_sequence_mask"]
        if hasattr(inspect.getmodule(packed), _REMAP) or not _numbers(given, position_ids):
            raise ValueError(
                "the mask must find documents in position_ids, got a mask that reads "
                "a different tensor"
            )
    for x in functions:
        _check_documents(x, position_ids)


def _numbers(documents: Tensor, position_ids: Tensor | None) -> bool:
    """Return whether `documents` (1, T) contains, for each token, the number of earlier jumps of
    the positions. transformers numbers documents like this.
    """
    if position_ids is None or documents.shape != position_ids.shape:
        return False
    jumps = (position_ids.diff(dim=-1) != 1).cumsum(-1)
    return torch.equal(documents[:, 1:], jumps) and not documents[:, :1].any()


def _read_all(functions: Sequence[Callable[..., Any]]) -> MaskShape:
    return reduce(and_, map(_read, functions), MaskShape())


def _read(function: Callable[..., Any]) -> MaskShape:
    name = _name(function)
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        raise ValueError(f"the mask has the function {name}, which is not transformers' own")
    within = inspect.getclosurevars(function).nonlocals
    if name in _SHAPES:
        return _SHAPES[name](within)
    if name == "or_masks":
        names = ", ".join(map(_name, within["mask_functions"]))
        raise ValueError(f"the mask is a union, of {names}")
    raise ValueError(f"the mask has the function {name}, which seqpar does not know")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function)).split(".")[0]


# For each known mask function, by name: how to make a MaskShape from the variables that the mask
# function closes over.
_SHAPES: dict[str, Callable[[Mapping[str, Any]], MaskShape]] = {
    "and_masks": lambda x: _read_all(x["mask_functions"]),
    "bidirectional_mask_function": lambda x: MaskShape(),
    "causal_mask_function": lambda x: MaskShape(causal=True),
    "chunked_overlay": lambda x: MaskShape(chunk=int(x["chunk_size"])),
    _PACKED: lambda x: MaskShape(),
    _REMAP: lambda x: _read(x["mask_function"]),
    "sliding_window_bidirectional_overlay": lambda x: MaskShape(
        left=int(x["sliding_window"]), right=int(x["sliding_window"])
    ),
    "sliding_window_overlay": lambda x: MaskShape(left=int(x["sliding_window"]) - 1),
}
