"""The labels of a packed batch: the label of a token is the next token of its document."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import SIGNED, CuSeqlens, as_int, check_tensor, parse_cu_seqlens
from seqpar.core.compiling import outside_graphs
from seqpar.core.ranges import ranges


@outside_graphs
def shift_labels(ids: Tensor, cu_seqlens: CuSeqlens, by: int = 1) -> Tensor:
    """Return next-token labels with the shape and dtype of `ids`, (T,) or (…, T).

    The label of a token is the id of the next token of its document. For multi-token prediction,
    the label is the id of the token that is `by` tokens later. The last `by` tokens of each
    document get −100, the index that `cross_entropy` ignores. Shift the labels before you shard
    them, because the next row on a rank is often not the next token of the document.

    Raise a ValueError unless `ids` has T tokens in its last dimension and a signed integer dtype.
    """
    check_tensor("ids", ids)
    cu = parse_cu_seqlens(cu_seqlens)
    by = min(as_int("by", by, 1), int(cu[-1]))
    if ids.dim() == 0 or ids.shape[-1] != cu[-1]:
        expected, found = f"the {cu[-1]} tokens of cu_seqlens", tuple(ids.shape)
        raise ValueError(f"ids must have {expected} in its last dimension, got {found}")
    if ids.dtype not in SIGNED:
        raise ValueError(f"ids must be of a signed integer dtype, to hold -100, got {ids.dtype}")
    labels = ids.roll(-by, -1)
    starts = np.maximum(cu[:-1], cu[1:] - by)
    labels[..., torch.from_numpy(ranges(starts, cu[1:])).to(ids.device)] = -100
    return labels
