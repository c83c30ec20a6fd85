"""The choice of the softmax backend for a block of keys.

Users may force a backend. Otherwise CPUs use `aten`, and CUDA devices the first kernel of
`gpu_kernels.py` that computes a block completely.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from seqpar.attention.backend import DEFAULT, load_backend
from seqpar.core.device_tables import device_of, is_on_cuda
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import aten_cuda
from seqpar.softmax.backends.aten_cuda import gpu_major
from seqpar.softmax.backends.gpu_kernels import best_backend
from seqpar.softmax.compute.call_options import CallOptions


def choose_backend(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions
) -> ModuleType:
    """Return the backend for a block of keys: a module with the functions of `reference.py`.

    If its `forward_blocks` is not None, this function computes all blocks in turn (`triton.py`).
    """
    name = options.backend
    if name == DEFAULT:
        name = default_backend(q, k, v, slices, options)
    return load_backend("softmax", name)


def default_backend(q: Tensor, k: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> str:
    """Return the name of the backend for a block of keys, if users force none.

    It depends only on the type of the device, the dtype, the head dims, the options and the slices.
    Backward therefore uses the same backend for a block as forward.
    """
    if options.anchored:  # `anchored_refusal` has checked that this backend can compute the call
        return "triton" if is_on_cuda(q) else "aten"
    if not aten_cuda.computes(q):
        return "aten"
    return best_backend(q, v, slices, options, gpu_major(device_of(q)))
