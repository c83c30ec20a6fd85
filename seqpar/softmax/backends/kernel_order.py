"""Choose the kernel that computes a block on a GPU.

For each generation of GPUs, `ORDERS` lists kernels. A block is computed by the first kernel of the
list that is available and can compute the whole block. The list for sm_90 was measured on an H200
(docs/benchmarks/kernels.md), without FlashAttention-3. Our own forward was measured only with warp
specialisation. The lists for all other GPUs were not measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT, triton_refusal
from seqpar.core.device_tables import device_of
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import aten_cuda, flash_attn
from seqpar.softmax.backends.aten_cuda import gpu_major, load_cudnn
from seqpar.softmax.backends.flash_attn import PACKAGES, load_package
from seqpar.softmax.backends.varlen import HeadDims, VarlenKernel
from seqpar.softmax.compute.call_options import CallOptions


@dataclass(frozen=True)
class KernelOrder:
    gpus: str  # the architectures
    # "cuDNN", "aten" (FlashAttention-2 in ATen), "triton", or keys of `PACKAGES`. Users choose a
    # backend with `use_backend`, where "aten" means the first two of these.
    names: tuple[str, ...]
    reason: str  # why the kernels are in this order


_SAME_KERNEL = "ATen's kernel is FlashAttention-2 without softcap and deterministic backward"
_CUDNN = (
    "cuDNN builds a plan for each shape, so it only computes full and causal masks of one document "
    "or equal ones, in multiples of 128 tokens; Triton computes its deterministic backward"
)
_BLACKWELL = KernelOrder(
    "sm_100 to sm_110",
    ("FlashAttention-4", "cuDNN", "FlashAttention-2", "aten", "triton"),
    f"only FlashAttention-4 and cuDNN are written for Blackwell's matrix units; {_CUDNN}; "
    f"{_SAME_KERNEL}",
)
# By the first number of the compute capability.
ORDERS = {
    8: KernelOrder("sm_80 to sm_89", ("FlashAttention-2", "aten", "triton"), _SAME_KERNEL),
    9: KernelOrder(
        "sm_90",
        ("FlashAttention-4", "FlashAttention-3", "cuDNN", "triton", "FlashAttention-2", "aten"),
        "by speed on an H200, but FlashAttention-3 was not measured; Triton computes the "
        "deterministic backward of 3 and cuDNN; " + _CUDNN,
    ),
    10: _BLACKWELL,
    11: _BLACKWELL,
    12: KernelOrder(
        "sm_120",
        ("FlashAttention-2", "aten", "triton"),
        f"FlashAttention-4's backward is not deterministic there; {_SAME_KERNEL}",
    ),
}
CALLS = {  # kinds of calls that varlen kernels may compute, with their head dim and softcap
    "full, causal and window masks, head dims to 128": (128, 0.0),
    "the same, head dims to 192": (192, 0.0),
    "the same, head dims to 248": (248, 0.0),
    "the same, a softcap, head dims to 128": (128, 1.0),
}
# The kernel that a meta device stands for: FlashAttention-4, whether it is installed or not.
_ON_META = PACKAGES["FlashAttention-4"].kernel(ModuleType("meta"), 9)
_ON_META = _ON_META._replace(softcap=True, deterministic=True)
OTHER_CALLS = "ALiBi, fp32, other masks and layouts"


def best_backend(q: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> str:
    """Return the backend of the first available kernel that can compute all slices of a block.

    A slice is a range of query rows and a range of key rows with a mask. The kernel can also
    compute the backward of the block if lse has a gradient.
    """
    device = device_of(q)
    for name in _order(device):
        if name == "triton":
            if triton_refusal(q, v) is None:
                return "triton"
            continue
        kernel = _load(name, gpu_major(device))
        if not isinstance(kernel, str) and kernel.computes_all(q, v, slices, options):
            return "flash_attn" if name in PACKAGES else "aten"
    return "aten"


def aten_kernel(q: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> VarlenKernel:
    """Return the kernel of ATen that computes the slices.

    This is cuDNN's kernel if it can compute all slices, and FlashAttention-2 if it cannot.
    """
    cudnn = _load("cuDNN", gpu_major(device_of(q)))
    if isinstance(cudnn, str) or not cudnn.computes_all(q, v, slices, options):
        return aten_cuda.KERNEL
    return cudnn


def preferred_kernel(
    operands: HeadDims, options: CallOptions, device: torch.device
) -> VarlenKernel | None:
    """Return the varlen kernel that will compute all blocks of a call, or None if this is not
    certain.

    A varlen kernel computes many documents in one call. The result is None if our Triton kernels or
    plain PyTorch might compute some blocks, or if different kernels might compute different blocks.
    A meta device stands for a GPU with FlashAttention-4.
    """
    if device.type == "meta":
        return _ON_META if _ON_META.takes(operands, options, True) else None
    if options.backend == "flash_attn":
        kernel = flash_attn.kernel_for(operands, options, True, device)
    elif options.backend == DEFAULT and device.type == "cuda":
        kernel = _first_kernel(operands, options, device)
        if kernel is aten_cuda.KERNEL:
            return kernel
    else:
        return None
    without_dlse = flash_attn.kernel_for(operands, options, False, device)
    return kernel if kernel is without_dlse else None


def _order(device: torch.device) -> tuple[str, ...]:
    """Return the names of the kernels for a GPU, in the order of preference.

    The result is empty if only plain PyTorch computes attention on the GPU.
    """
    if not aten_cuda.is_recent(device):
        return ()
    return ("triton",) if torch.version.hip else ORDERS.get(gpu_major(device), ORDERS[12]).names


def _first_kernel(
    operands: HeadDims, options: CallOptions, device: torch.device
) -> VarlenKernel | None:
    """Return the first kernel in a GPU's list that computes the operands, or None.

    The result is also None if cuDNN or our Triton kernels might compute some blocks instead.
    """
    major = gpu_major(device)
    for name in _order(device):
        is_aten = name == "aten" and isinstance(load_cudnn(major), str)
        if name not in PACKAGES and not is_aten:
            return None
        kernel = aten_cuda.KERNEL if is_aten else load_package(name, major)
        if not isinstance(kernel, str) and kernel.takes(operands, options, True):
            return kernel
    return None


def described_kernels(device: torch.device) -> str:
    """Return a text that describes the kernels of this rank, to compare them with other ranks.

    If the texts of two ranks are equal, `preferred_kernel` returns equal kernels on both ranks.
    """
    major = gpu_major(device)
    described: dict[str, object] = {"major": major, "hip": torch.version.hip}
    for name in PACKAGES:
        kernel = load_package(name, major)
        described[name] = None if isinstance(kernel, str) else kernel.limits()
    return json.dumps(described)


def default_kernel(major: int) -> tuple[str, dict[str, str]]:
    """Return the kernel that computes full and causal masks in half precision by default.

    The result has a second value, a dictionary of reasons: why FlashAttention-4, and each kernel
    that comes before the default kernel in the list, cannot be used. `major` is the first number of
    the compute capability of an NVIDIA GPU, 8 or more.
    """
    order = ORDERS.get(major, ORDERS[12]).names
    loaded = {x: _load(x, major) for x in ("FlashAttention-4", *order) if x != "triton"}
    reasons = {name: x for name, x in loaded.items() if isinstance(x, str)}
    chosen = next(name for name in order if name not in reasons)
    for name in order[order.index(chosen) :]:
        reasons.pop(name, None)
    return chosen, reasons


def kernel_table() -> dict[str, dict[str, str]]:
    """Return the order of kernels for each GPU and kind of call, and the reason for the order.

    `python -m seqpar info` prints this table.
    """
    table: dict[str, dict[str, str]] = {}
    for major, order in ORDERS.items():
        rows = table.setdefault(order.gpus, {})
        for call, (dim, softcap) in CALLS.items():
            operands = HeadDims(torch.bfloat16, dim, dim)
            options = CallOptions(1.0, softcap, DEFAULT, True)
            rows[call] = ", ".join(
                name
                for name in order.names
                if name == "triton" or _kernel(name, major).takes(operands, options, True)
            )
        rows[OTHER_CALLS] = "triton"
        rows["why"] = order.reason
    return table


def _load(name: str, major: int) -> VarlenKernel | str:
    if name == "cuDNN":
        enabled = torch.backends.cuda.cudnn_sdp_enabled()
        return load_cudnn(major) if enabled else "torch.backends.cuda.enable_cudnn_sdp(False)"
    return aten_cuda.KERNEL if name == "aten" else load_package(name, major)


def _kernel(name: str, major: int) -> VarlenKernel:
    """Return an object with the limits of a kernel, even if the kernel is not available."""
    if name == "cuDNN":
        return aten_cuda.cudnn_kernel(major)
    if name == "aten":
        return aten_cuda.KERNEL
    return PACKAGES[name].kernel(ModuleType(name), major)
