"""Who sees whom, as a call says it: by `causal` and what is beside it, or by `mask` alone."""

from __future__ import annotations

from types import EllipsisType
from typing import NamedTuple

from torch import Tensor

from seqpar.core.arguments import (
    CuSeqlens,
    WindowSize,
    as_bool,
    as_int_tensor,
    parse_window,
    shown,
)
from seqpar.core.ranges import UNLIMITED
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask
from seqpar.layout.masks.mask_ranges import from_handle, key_of_handle

Causal = bool | EllipsisType  # `...` where a call does not say


class Masking(NamedTuple):
    """A mask as an operator carries it: `ranges` is a handle of `Mask.of_ranges`, or the rest."""

    prefix_lens: Tensor | None
    ranges: Tensor | None
    causal: bool
    left: int
    right: int

    @classmethod
    def of(
        cls,
        causal: Causal,
        window_size: WindowSize,
        prefix_lens: CuSeqlens | None,
        mask: Mask | None,
    ) -> Masking:
        """Return what a user's arguments say; raise an error that names one that is wrong."""
        left, right = parse_window(window_size)
        if mask is None:
            if causal is ...:
                raise TypeError("causal must be said, True or False, unless there is a mask")
            prefix = None if prefix_lens is None else as_int_tensor("prefix_lens", prefix_lens)
            return cls(prefix, None, as_bool("causal", causal), left, right)
        if not isinstance(mask, Mask) or mask.ranges is None:
            how = "of ranges (seqpar.Mask.of_ranges); causal and others say any other mask"
            raise ValueError(f"mask must be one {how}, got {shown(mask)}")
        if causal is not ... and as_bool("causal", causal):
            raise ValueError(f"causal must be left out, or False, {_BESIDE}")
        if (left, right) != (-1, -1):
            raise ValueError(f"window_size must be unlimited {_BESIDE}, got ({left}, {right})")
        if prefix_lens is not None:
            raise ValueError(f"prefix_lens must be None {_BESIDE}, got {shown(prefix_lens)}")
        return cls(None, mask.ranges.handle, False, left, right)

    def to_mask(self, layout: Geometry, kv_layout: Geometry) -> Mask:
        """Return the mask; raise a ValueError that names an argument which does not fit."""
        if self.ranges is None:
            prefix = None if self.prefix_lens is None else self.prefix_lens.numpy()
            return Mask.of(self.causal, (self.left, self.right), prefix, kv_layout)
        mask = Mask(UNLIMITED, UNLIMITED, ranges=from_handle(self.ranges))
        mask.check_fits(layout, kv_layout)
        return mask

    def contents(self) -> tuple[bytes | None, bytes | None]:
        """Return what tells the tensors' contents apart."""
        prefix = None if self.prefix_lens is None else self.prefix_lens.numpy().tobytes()
        return prefix, None if self.ranges is None else key_of_handle(self.ranges)

    def shared(self) -> dict[str, object]:
        """Return what all ranks must agree on, by the names that users know."""
        return {
            "causal": self.causal,
            "window_size": [self.left, self.right],
            "prefix_lens": None if self.prefix_lens is None else self.prefix_lens.tolist(),
            "mask": None if self.ranges is None else key_of_handle(self.ranges).hex()[:16],
        }


_BESIDE = "beside mask, whose ranges say who sees whom"
