"""Choose the backend of calls for which users force none.

On CPUs it is `aten`. On CUDA it is `aten` for the blocks of keys that its fused kernel computes
alone, until a committed result of a device shows our Triton kernels ahead there. What would be left
to plain PyTorch, such as a window, takes Triton a fraction of the time.
"""

from __future__ import annotations

from torch import Tensor

from seqpar.attention.backend import triton_refusal
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import aten, pieces


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Slices,
    softcap: float,
    biased: bool = False,
    anchored: bool = False,
) -> str:
    """Return the name of the backend for queries over a block of keys and values.

    It follows from the device's type, the dtype, the head dims, the softcap, whether scores are
    `biased` by distances, whether tiles are `anchored`, and the slices alone, so backward computes
    a block with the backend of forward.
    """
    if anchored:  # of which `anchored_refusal` has made sure
        return "triton" if q.is_cuda else "aten"
    if not q.is_cuda or not aten.is_recent(q.device):
        return "aten"
    # In backward v may get a column, for the gradient of lse.
    fused = not biased and aten.fuses(q, k.shape[-1], v.shape[-1] + 1, softcap=softcap)
    if (fused and pieces.unmasked_fused(slices).plain is None) or triton_refusal(q, v):
        return "aten"
    return "triton"
