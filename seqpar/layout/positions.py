"""Find the documents of a batch from the positions of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seqpar.core.arguments import Ints

PositionIds = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.generic] | Tensor


def cu_seqlens_of(position_ids: PositionIds) -> Ints:
    """Return the cu_seqlens of a batch from the positions of its tokens, (T,) or (B, S).

    The rows of (B, S) follow one another. A document begins with each row, and wherever a position
    is not one more than the position before. Raise a ValueError if a document does not begin at 0.
    """
    ids = _as_rows(position_ids)
    begins = np.ones(ids.shape, dtype=bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1] + 1
    wrong = begins & (ids != 0)
    if wrong.any():
        row, column = np.unravel_index(int(wrong.argmax()), wrong.shape)
        where = f"row {row}, column {column}" if np.ndim(position_ids) == 2 else f"index {column}"
        before = f" behind {ids[row, column - 1]}" if column else ""
        raise ValueError(
            "position_ids must count up from 0 in each document, "
            f"got {ids[row, column]}{before} at {where}"
        )
    return np.r_[np.flatnonzero(begins), ids.size]


def _as_rows(position_ids: PositionIds) -> Ints:
    """Return `position_ids` as a 2-D int64 array; a CUDA tensor costs one synchronisation."""
    try:
        on_cpu = position_ids.detach().cpu() if isinstance(position_ids, Tensor) else position_ids
        array = np.asarray(on_cpu)
    except (TypeError, ValueError, NotImplementedError):  # bfloat16, ragged, or without data
        raise ValueError("position_ids must be integers of shape (T,) or (B, S)") from None
    if array.ndim not in (1, 2) or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            "position_ids must be integers of shape (T,) or (B, S), "
            f"got shape {array.shape} of {array.dtype}"
        )
    return np.atleast_2d(array.astype(np.int64))
