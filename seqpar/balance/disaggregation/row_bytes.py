"""Bytes that are sent with a row of queries or keys."""

from __future__ import annotations

import math
from typing import NamedTuple

from seqpar.core.arguments import as_float, as_int, shown
from seqpar.core.dtypes import accumulator_itemsize

MIN_ROW_BYTES, MAX_ROW_BYTES = 1e-9, 1e18  # limits beyond any real row, whatever the unit


class RowBytes(NamedTuple):
    """Bytes that are sent with a row of queries (q, out, lse) and with a row of keys (k and v)."""

    query: float
    key: float

    @classmethod
    def of(
        cls,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        itemsize: int = 2,
    ) -> RowBytes:
        """Return the bytes of a forward pass. The gradients of a backward pass have as many
        bytes.
        """
        heads, kv_heads, head_dim, value_dim, itemsize = _checked(
            heads, kv_heads, head_dim, value_dim, itemsize
        )
        width = head_dim + value_dim
        lse = accumulator_itemsize(itemsize)
        return cls(heads * (width * itemsize + lse), kv_heads * width * itemsize)

    @classmethod
    def sent(
        cls,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        itemsize: int = 2,
        backward: float = 2.5,
    ) -> RowBytes:
        """Return the bytes that `DisaggregatedAttention` sends with a row, as one number for
        forward and backward.

        `backward` is the time of a backward pass divided by the time of a forward pass. The bytes
        of each pass are multiplied by the mean time of the two passes, and divided by the time of
        the pass, because a shorter pass hides fewer bytes. The larger of the two results is
        returned. Results are sent in fp32, or in fp64 if the operands are fp64.
        """
        heads, kv_heads, head_dim, value_dim, itemsize = _checked(
            heads, kv_heads, head_dim, value_dim, itemsize
        )
        backward = as_float("backward", backward)
        if not 0 < backward < math.inf:
            raise ValueError(f"backward must be above 0 and finite, got {backward}")
        exact = accumulator_itemsize(itemsize)
        operands, width = head_dim * itemsize, head_dim + value_dim
        # The mean time of both passes, divided by the time of each pass.
        forward, backward = (1 + backward) / 2, (1 + 1 / backward) / 2
        query = operands + (value_dim + 1) * exact
        returned = operands + value_dim * itemsize + (head_dim + 2) * exact
        keys = max(width * itemsize * forward, width * (itemsize + exact) * backward)
        return cls(heads * max(query * forward, returned * backward), kv_heads * keys)


def _checked(
    heads: int, kv_heads: int, head_dim: int, value_dim: int | None, itemsize: int
) -> tuple[int, ...]:
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    sizes["itemsize"] = itemsize
    return tuple(as_int(name, size, 1, 2**31 - 1) for name, size in sizes.items())


def check_row_bytes(row_bytes: RowBytes) -> RowBytes:
    if not isinstance(row_bytes, RowBytes):
        raise ValueError(f"row_bytes must be RowBytes, got {shown(row_bytes)}")
    if not all(MIN_ROW_BYTES <= as_float("row_bytes", each) <= MAX_ROW_BYTES for each in row_bytes):
        limits = f"positive, from {MIN_ROW_BYTES:.0e} to {MAX_ROW_BYTES:.0e}"
        raise ValueError(f"row_bytes must be {limits}, got {shown(row_bytes)}")
    return row_bytes
