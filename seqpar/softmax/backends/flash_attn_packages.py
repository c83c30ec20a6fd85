"""The packages of FlashAttention-2, -3 and -4: how each one is called, and whether it can be.

Each package is called through the functions below its autograd functions, which take the lse of all
keys on all ranks. A package that is not installed may be in the cache of Hugging Face's package
`kernels`; seqpar downloads none. One that is missing, broken or of another version gives a reason
instead of a kernel, so that the next best kernel computes.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.kernels.gpus import gpu_of
from seqpar.softmax.backends.varlen import BackwardRows, VarlenKernel
from seqpar.softmax.backends.varlen_calls import SegmentTables
from seqpar.softmax.compute.call_options import CallOptions


class Package(NamedTuple):
    """A package that computes attention on CUDA.

    Attributes:
        requirement: what to install, as pip takes it.
        modules: names of the module with its functions, in different installations.
        parameters: the functions that are called, with the names of their arguments.
        majors: the GPUs for which it computes everything that `kernel` says, by the first number of
            their compute capability.
        repository: the package in Hugging Face's hub of kernels.
        kernel: gets the module and the first number of the compute capability.
    """

    requirement: str
    modules: tuple[str, ...]
    parameters: dict[str, str]
    majors: tuple[int, ...]
    repository: str
    kernel: Callable[[ModuleType, int], VarlenKernel]


def gpu_major(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability."""
    return gpu_of(device).major


def _arguments(
    tables: SegmentTables, options: CallOptions, unlimited: int | None = -1
) -> dict[str, object]:
    """Return the arguments that all packages have; `unlimited` is a window's side without limit."""
    left, right = (unlimited if side == -1 else side for side in tables.window)
    return {
        "cu_seqlens_q": tables.cu_q, "cu_seqlens_k": tables.cu_k,
        "max_seqlen_q": tables.longest_q, "max_seqlen_k": tables.longest_k,
        "softmax_scale": options.scale, "softcap": options.softcap,
        "window_size_left": left, "window_size_right": right,
    }  # fmt: skip


def _flash_attention_2(package: ModuleType, _major: int) -> VarlenKernel:
    def arguments(tables: SegmentTables, options: CallOptions) -> dict[str, object]:
        unused = {"dropout_p": 0.0, "alibi_slopes": None}
        return _arguments(tables, options) | {"causal": tables.window == (-1, 0)} | unused

    def forward(
        q: Tensor, k: Tensor, v: Tensor, tables: SegmentTables, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        function = package._flash_attn_varlen_forward
        out, lse, *_ = function(q, k, v, **arguments(tables, options))
        return out, lse

    def backward(
        rows: BackwardRows, tables: SegmentTables, options: CallOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in (rows.q, rows.k, rows.v))
        package._flash_attn_varlen_backward(
            rows.dout, rows.q, rows.k, rows.v, rows.out, rows.lse, dq, dk, dv,
            deterministic=options.deterministic, **arguments(tables, options),
        )  # fmt: skip
        return dq, dk, dv

    return VarlenKernel(
        forward, backward, max_head_dim=256, softcap=True, lse_gradient=False, deterministic=True
    )


def _flash_attention_3(package: ModuleType, _major: int) -> VarlenKernel:
    def forward(
        q: Tensor, k: Tensor, v: Tensor, tables: SegmentTables, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        is_causal = tables.window == (-1, 0)
        out, lse, *_ = package._flash_attn_forward(
            q, k, v, causal=is_causal, **_arguments(tables, options)
        )
        return out, lse

    def backward(
        rows: BackwardRows, tables: SegmentTables, options: CallOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in (rows.q, rows.k, rows.v))
        package._flash_attn_backward(
            rows.dout, rows.q, rows.k, rows.v, rows.out, rows.lse, dq=dq, dk=dk, dv=dv,
            is_causal=tables.window == (-1, 0), deterministic=options.deterministic,
            **_arguments(tables, options),
        )  # fmt: skip
        return dq, dk, dv

    # Some versions ignore `deterministic` without an error (flash-attention's issue 1596), and
    # their functions have the same signatures.
    return VarlenKernel(
        forward, backward, max_head_dim=256, softcap=True, lse_gradient=False, deterministic=False
    )


# FlashAttention-4 compiles in its calls. Threads that compiled at once got NameErrors, and crashed.
_one_at_a_time = threading.Lock()


def _flash_attention_4(package: ModuleType, major: int) -> VarlenKernel:
    def arguments(tables: SegmentTables, options: CallOptions) -> dict[str, object]:
        return _arguments(tables, options, None) | {"causal": tables.window == (-1, 0)}

    def forward(
        q: Tensor, k: Tensor, v: Tensor, tables: SegmentTables, options: CallOptions
    ) -> tuple[Tensor, Tensor]:
        with _one_at_a_time:
            out, lse, *_ = package._flash_attn_fwd(
                q, k, v, return_lse=True, **arguments(tables, options)
            )
        return out, lse

    def backward(
        rows: BackwardRows, tables: SegmentTables, options: CallOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _one_at_a_time:
            dq, dk, dv = package._flash_attn_bwd(
                rows.q, rows.k, rows.v, rows.out, rows.dout, rows.lse, dlse=rows.dlse,
                deterministic=options.deterministic, **arguments(tables, options),
            )  # fmt: skip
        return dq, dk, dv

    # On sm_100 it has head dim 256 too, but without a softcap and without the gradient of lse.
    max_head_dim = 256 if major == 9 else 128
    return VarlenKernel(
        forward, backward, max_head_dim, softcap=True, lse_gradient=True, deterministic=True
    )


_SEGMENTS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SCORES = "softmax_scale softcap window_size_left window_size_right"
_COMMON = f"q k v {_SEGMENTS} {_SCORES}"
_BACKWARD = f"dout out dq dk dv deterministic {_COMMON}"
PACKAGES = {
    "FlashAttention-4": Package(
        "flash-attn-4==4.0.0b36",
        ("flash_attn.cute.interface",),
        {
            "_flash_attn_fwd": f"causal return_lse {_COMMON}",
            "_flash_attn_bwd": f"causal lse dlse {_BACKWARD}",
        },
        (9, 10, 11),
        "kernels-community/flash-attn4",
        _flash_attention_4,
    ),
    "FlashAttention-3": Package(
        "flash-attn-3 (folder hopper of flash-attention, commit 01afd16d)",
        ("flash_attn_3.flash_attn_interface", "flash_attn_interface"),
        {
            "_flash_attn_forward": f"causal {_COMMON}",
            "_flash_attn_backward": f"is_causal softmax_lse {_BACKWARD}",
        },
        (9,),
        "kernels-community/flash-attn3",
        _flash_attention_3,
    ),
    "FlashAttention-2": Package(
        "flash-attn>=2.7",
        ("flash_attn.flash_attn_interface",),
        {
            "_flash_attn_varlen_forward": f"causal dropout_p alibi_slopes {_COMMON}",
            "_flash_attn_varlen_backward": f"causal dropout_p alibi_slopes softmax_lse {_BACKWARD}",
        },
        (8, 9, 10, 12),
        "kernels-community/flash-attn2",
        _flash_attention_2,
    ),
}


@cache
def load_package(name: str, major: int) -> VarlenKernel | str:
    """Return the kernel of a package, one of `PACKAGES`, or the reason why there is none.

    `major` is the first number of the GPU's compute capability.
    """
    package = PACKAGES[name]
    if major not in package.majors:
        return f"{name} does not compute everything on sm_{major}x"
    module = _module(package)
    if isinstance(module, str):
        return module
    for function, names in package.parameters.items():
        lacking = _lacking(getattr(module, function, None), names.split())
        if lacking is not None:
            return f"{module.__name__} has no {function}{lacking}: install {package.requirement}"
    return package.kernel(module, major)


def _module(package: Package) -> ModuleType | str:
    """Return the module of an installed or cached package, or the reason why there is none."""
    for path in package.modules:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                return f"{path} cannot be imported: {error}"  # something that it needs is missing
        except Exception as error:  # libraries of another torch or CUDA fail in many ways
            return f"{path} cannot be imported: {type(error).__name__}: {error}"
    missing = f"{package.requirement} is not installed"
    try:
        kernels = importlib.import_module("kernels")
    except ImportError:
        return missing
    try:
        # The folder of the build for this torch and GPU is build/NAME of the repository's folder.
        build = kernels.install_kernel(package.repository, version=1, local_files_only=True)
        built: ModuleType = kernels.get_local_kernel(build.parent.parent)
    except Exception as error:  # it is not in the cache, or has no build for this torch
        return f"{missing}, nor is {package.repository} in the cache of kernels: {error}"
    # The functions of its module, in one of the hub's names for it.
    return getattr(built, package.modules[0].rsplit(".", 1)[1], built)


def _lacking(function: object, names: list[str]) -> str | None:
    """Return a text that names the missing arguments of a function, or None."""
    if not callable(function):
        return ""
    # torch.library.custom_op hides the function's signature.
    wrapped: Callable[..., object] = getattr(function, "__dict__", {}).get("_init_fn", function)
    parameters = inspect.signature(wrapped).parameters
    lacking = [name for name in names if name not in parameters]
    return f" with the arguments {', '.join(lacking)}" if lacking else None
