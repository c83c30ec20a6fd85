"""Which kernel computes a call on which GPU, and why: the only place where this is decided.

A call gets the first kernel of its GPU's order that is available and computes all of the call. On
an H200 FlashAttention-4 was the fastest (docs/benchmarks/kernels.md). The rest of the orders has
not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT, triton_refusal
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import aten_cuda
from seqpar.softmax.backends.flash_attn_packages import PACKAGES, load_package
from seqpar.softmax.backends.varlen import VarlenKernel
from seqpar.softmax.compute.call_options import CallOptions


@dataclass(frozen=True)
class KernelOrder:
    """The kernels of a generation of GPUs, the preferred one first.

    Attributes:
        gpus: the architectures.
        names: "aten", keys of `PACKAGES`, and last "triton". `use_backend` chooses another one.
        reason: why they are in this order.
    """

    gpus: str
    names: tuple[str, ...]
    reason: str


_SAME_KERNEL = "ATen's kernel is FlashAttention-2 without softcap and deterministic backward"
_BLACKWELL = KernelOrder(
    "sm_100 to sm_110",
    ("FlashAttention-4", "FlashAttention-2", "aten", "triton"),
    f"only FlashAttention-4 is written for Blackwell's matrix units; {_SAME_KERNEL}",
)
# By the first number of the compute capability.
ORDERS = {
    8: KernelOrder("sm_80 to sm_89", ("FlashAttention-2", "aten", "triton"), _SAME_KERNEL),
    9: KernelOrder(
        "sm_90",
        ("FlashAttention-4", "FlashAttention-3", "FlashAttention-2", "aten", "triton"),
        "4 and 3 are written for Hopper, and 4 takes the gradient of lse; Triton computes 3's "
        f"deterministic backward; {_SAME_KERNEL}",
    ),
    10: _BLACKWELL,
    11: _BLACKWELL,
    12: KernelOrder(
        "sm_120",
        ("FlashAttention-2", "aten", "triton"),
        f"FlashAttention-4's backward is not deterministic there; {_SAME_KERNEL}",
    ),
}
CALLS = {  # head dim and softcap of kinds of calls that varlen kernels may compute
    "full, causal and window masks, head dims to 128": (128, 0.0),
    "the same, head dims to 192": (192, 0.0),
    "the same, head dims to 248": (248, 0.0),
    "the same, a softcap, head dims to 128": (128, 1.0),
}
OTHER_CALLS = "ALiBi, fp32, other masks and layouts"


def best_backend(q: Tensor, v: Tensor, slices: Slices, options: CallOptions, major: int) -> str:
    """Return the backend of the first kernel that is available and computes all slices.

    It also computes them with a gradient of lse.
    """
    names = () if torch.version.hip else ORDERS.get(major, ORDERS[12]).names[:-1]
    for name in names:
        kernel = aten_cuda.KERNEL if name == "aten" else load_package(name, major)
        if not isinstance(kernel, str) and kernel.computes_all(q, v, slices, options):
            return "aten" if name == "aten" else "flash_attn"
    return "aten" if triton_refusal(q, v) else "triton"


def kernel_table() -> dict[str, dict[str, str]]:
    """Return by GPU and by kind of call the kernels that may compute it, in order, and why."""
    table: dict[str, dict[str, str]] = {}
    for major, order in ORDERS.items():
        rows = table.setdefault(order.gpus, {})
        for call, (dim, softcap) in CALLS.items():
            q = torch.empty(1, 1, 1, dim, dtype=torch.bfloat16, device="meta")
            options = CallOptions(1.0, softcap, DEFAULT, True)
            kernels = {name: _kernel(name, major) for name in order.names[:-1]}
            takes = [name for name, x in kernels.items() if x.takes(q, q, options, True)]
            rows[call] = ", ".join([*takes, "triton"])
        rows[OTHER_CALLS] = "triton"
        rows["why"] = order.reason
    return table


def _kernel(name: str, major: int) -> VarlenKernel:
    """Return a kernel to ask for its limits, whether its package is installed or not."""
    if name == "aten":
        return aten_cuda.KERNEL
    return PACKAGES[name].kernel(ModuleType(name), major)
