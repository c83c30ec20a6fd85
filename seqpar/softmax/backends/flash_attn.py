"""The backend "flash_attn": attention with the best installed package of FlashAttention.

This backend computes bf16 and fp16 on CUDA, usually all documents in one call (`varlen.py`). Plain
PyTorch computes two cases that the packages cannot compute. The first case is ALiBi, because the
packages measure distances in rows and not in positions. The second case is a mask under which the
range of attended keys does not move by exactly one key from each query row to the next.

Packages are searched in the environment and in the cache of Hugging Face's package `kernels`.
seqpar does not download packages. If a package is missing, is broken or has an unknown version,
`load_package` returns the reason in place of a kernel.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Hashable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from seqpar.core.device_tables import device_of
from seqpar.core.installed import installed_version
from seqpar.core.torch_private import function_of
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends.aten_cuda import gpu_major
from seqpar.softmax.backends.varlen import (
    Backward,
    BackwardRows,
    Forward,
    HeadDims,
    VarlenBlock,
    VarlenKernel,
    VarlenTables,
)
from seqpar.softmax.compute.call_options import CallOptions


class Package(NamedTuple):
    requirement: str  # what to install, in the form that pip takes
    # The possible names of the module with the functions, which depend on the installation.
    modules: tuple[str, ...]
    # The functions that are called, each with the names of its arguments.
    parameters: dict[str, str]
    # The GPUs on which the package computes everything that its `VarlenKernel` promises, by the
    # first number of their compute capability.
    majors: tuple[int, ...]
    repository: str  # the name of the package in Hugging Face's hub of kernels
    # Makes the kernel from the module and the first number of the compute capability.
    kernel: Callable[[ModuleType, int], VarlenKernel]


def _arguments(
    tables: VarlenTables, options: CallOptions, unlimited: int | None = -1
) -> dict[str, object]:
    """Return the arguments that the functions of all packages have in common.

    `unlimited` is the value that a package expects for a side of the window without a limit.
    """
    left, right = (unlimited if side == -1 else side for side in tables.window)
    return {
        "cu_seqlens_q": tables.cu_q, "cu_seqlens_k": tables.cu_k,
        "max_seqlen_q": tables.longest_q, "max_seqlen_k": tables.longest_k,
        "softmax_scale": options.scale, "softcap": options.softcap,
        "window_size_left": left, "window_size_right": right,
    }  # fmt: skip


def _is_causal(tables: VarlenTables) -> bool:
    return tables.window == (-1, 0)


def _filling_gradients(
    forward_name: str, backward_name: str, causal: str, deterministic: bool, **unused: object
) -> Callable[[ModuleType, int], VarlenKernel]:
    """Return a function that makes a `VarlenKernel` from the module of a package of FlashAttention.

    The backward of the package must write gradients into tensors that the caller passes.

    Args:
        forward_name, backward_name: the names of the package's functions.
        causal: the name of backward's argument for a causal mask.
        deterministic: whether the package's backward has an option for gradients with the same bits
            in each run.
        unused: further arguments that are passed to both functions.
    """

    def make(package: ModuleType, _major: int) -> VarlenKernel:
        def forward(tables: VarlenTables, options: CallOptions) -> Forward:
            arguments = _arguments(tables, options) | unused | {"causal": _is_causal(tables)}

            def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                out, lse, *_ = getattr(package, forward_name)(q, k, v, **arguments)
                return out, lse

            return run

        def backward(tables: VarlenTables, options: CallOptions) -> Backward:
            arguments = _arguments(tables, options) | unused | {causal: _is_causal(tables)}
            arguments |= {"deterministic": options.deterministic}

            def run(rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
                dq, dk, dv = (torch.empty_like(x) for x in (rows.q, rows.k, rows.v))
                getattr(package, backward_name)(
                    rows.dout, rows.q, rows.k, rows.v, rows.out, rows.lse, dq=dq, dk=dk, dv=dv,
                    **arguments,
                )  # fmt: skip
                return dq, dk, dv

            return run

        return VarlenKernel(forward, backward, 256, softcap=True, deterministic=deterministic)

    return make


# FlashAttention-4 compiles within its calls. If several threads compile at the same time, they get
# NameErrors and crash.
_one_at_a_time = threading.Lock()


# In rows. FlashAttention-4 compiles one variant of its kernels for calls whose longest segment has
# more rows than a tile, and another variant for other calls. To get only the first variant, we pass
# a longest segment that has more rows than the largest tile of any GPU.
_LARGEST_TILE = 256
# If a call has more segments than this, FlashAttention-4 compiles a different variant, which reads
# a table of the segments' tiles.
_MANY_SEGMENTS = 256
# The first version whose backward is deterministic on sm_90 if query heads share KV heads (pull
# request 2510 of flash-attention).
_FIRST_DETERMINISTIC = "4.0.0b12"
# The first version whose backward accepts score functions together with `cu_seqlens`. Earlier
# versions raise an error.
_FIRST_WITH_SOFTCAP = "4.0.0b24"


def _flash_attention_4(package: ModuleType, major: int) -> VarlenKernel:
    @cache
    def softcap_functions(softcap: float) -> dict[str, object]:
        """Return the arguments of FlashAttention-4 for a softcap.

        The result is cached, because the package would make new functions and hash them in each
        call.
        """
        make = package.utils.create_softcap_scoremod, package.utils.create_softcap_scoremod_bwd
        return {"score_mod": make[0](softcap), "score_mod_bwd": make[1](softcap)}

    def arguments(tables: VarlenTables, options: CallOptions) -> dict[str, object]:
        """Return the arguments of backward, except for tensors."""
        found = _arguments(tables, options, None) | {"causal": _is_causal(tables)}
        found |= {"deterministic": options.deterministic}
        if options.softcap:
            found |= {"softcap": 0.0, **softcap_functions(options.softcap)}
        if _dense(tables) is not None:
            return found | _NO_SEGMENTS
        longest = max(tables.longest_q, tables.longest_k, _LARGEST_TILE + 1)
        return found | {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def forward(tables: VarlenTables, options: CallOptions) -> Forward:
        named = arguments(tables, options) | {"return_lse": True}
        for name in ("deterministic", "score_mod_bwd"):
            named.pop(name, None)

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            with _one_at_a_time:
                out, lse, *_ = package._flash_attn_fwd(q, k, v, **named)
            return out, lse

        if (dense := _dense(tables)) is None:
            return run
        rows, keys = dense

        def run_dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = run(_by_segments(q, rows), _by_segments(k, keys), _by_segments(v, keys))
            return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

        return run_dense

    def backward(tables: VarlenTables, options: CallOptions) -> Backward:
        named, dense = arguments(tables, options), _dense(tables)

        def run(rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
            dout, q, out, lse, dlse, k, v = rows
            with _one_at_a_time:
                dq, dk, dv = package._flash_attn_bwd(q, k, v, out, dout, lse, dlse=dlse, **named)
            return dq, dk, dv

        if dense is None:
            return run
        n, keys = dense

        def run_dense(rows: BackwardRows) -> tuple[Tensor, Tensor, Tensor]:
            dout, q, out, lse, dlse, k, v = rows
            dout, q, out = _by_segments(dout, n), _by_segments(q, n), _by_segments(out, n)
            lse, dlse = _by_heads(lse, n), None if dlse is None else _by_heads(dlse, n)
            k, v = _by_segments(k, keys), _by_segments(v, keys)
            dq, dk, dv = run(BackwardRows(dout, q, out, lse, dlse, k, v))
            return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)

        return run_dense

    def variant(tables: VarlenTables, options: CallOptions) -> Hashable:
        left, right = tables.window
        has_many = len(tables.cu_q) > _MANY_SEGMENTS
        form = left == -1, right == -1, _is_causal(tables), _dense(tables) is not None, has_many
        return *form, options.softcap, options.deterministic

    # On sm_100, FlashAttention-4 also has a head dim of 256, but without a softcap and without the
    # gradient of lse.
    max_head_dim = 256 if major == 9 else 128
    return VarlenKernel(
        forward,
        backward,
        max_head_dim,
        softcap=_is_at_least(package, _FIRST_WITH_SOFTCAP),
        lse_gradient=True,
        deterministic=major != 9 or _is_at_least(package, _FIRST_DETERMINISTIC),
        # Versions with this function can compile a call of fake tensors.
        variant=variant if hasattr(package, "is_fake_mode") else None,
    )


def _dense(tables: VarlenTables) -> tuple[int, int] | None:
    """Return the number of query rows and of key rows of each segment, or None.

    A segment is a range of query rows and a range of key rows. The result is None if the segments
    have different sizes, or if they are so small that FlashAttention-4 would need a third variant
    of its kernels. In all other cases, FlashAttention-4 can compute the segments as a batch, which
    is faster than a packed tensor.
    """
    dense = tables.dense
    return dense if dense is not None and min(dense) > _LARGEST_TILE else None


def _by_segments(x: Tensor, length: int) -> Tensor:
    return x.view(-1, length, *x.shape[1:])


def _by_heads(x: Tensor, length: int) -> Tensor:
    return x.view(x.shape[0], -1, length).transpose(0, 1).contiguous()


def _is_at_least(package: ModuleType, first: str) -> bool:
    """Return whether the version of FlashAttention-4 is known, and is `first` or a later
    version.
    """
    if not package.__name__.startswith("flash_attn."):  # builds from the hub have no version
        return False
    version = installed_version("flash-attn-4")
    return version is not None and TorchVersion(version) >= first


_SEGMENTS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_NO_SEGMENTS = dict.fromkeys(_SEGMENTS.split())  # all are None
_SCORES = "softmax_scale softcap window_size_left window_size_right"
_COMMON = f"q k v {_SEGMENTS} {_SCORES}"
_BACKWARD = f"dout out dq dk dv deterministic {_COMMON}"
PACKAGES = {
    "FlashAttention-4": Package(
        "flash-attn-4==4.0.0b36",
        ("flash_attn.cute.interface",),
        {
            "_flash_attn_fwd": f"causal return_lse score_mod {_COMMON}",
            "_flash_attn_bwd": f"causal lse dlse score_mod score_mod_bwd {_BACKWARD}",
            "utils.create_softcap_scoremod": "softcap_val",
            "utils.create_softcap_scoremod_bwd": "softcap_val",
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
        # Some versions ignore `deterministic` without an error (flash-attention's issue 1596).
        # Their functions have the same signatures as those of other versions, so the kernel never
        # counts as deterministic.
        _filling_gradients("_flash_attn_forward", "_flash_attn_backward", "is_causal", False),
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
        _filling_gradients(
            "_flash_attn_varlen_forward",
            "_flash_attn_varlen_backward",
            "causal",
            deterministic=True,
            dropout_p=0.0,
            alibi_slopes=None,
        ),
    ),
}


@cache
def load_package(name: str, major: int) -> VarlenKernel | str:
    """Return the kernel of a package, or the reason why it cannot be used.

    `name` is one of `PACKAGES`, and `major` is the first number of the GPU's compute capability.
    """
    package = PACKAGES[name]
    if major not in package.majors:
        return f"{name} does not compute everything on sm_{major}x"
    module = _module(package)
    if isinstance(module, str):
        return module
    for function, names in package.parameters.items():
        found: object = module
        for part in function.split("."):
            found = getattr(found, part, None)
        lacking = _lacking(found, names.split())
        if lacking is not None:
            return f"{module.__name__} has no {function}{lacking}: install {package.requirement}"
    return package.kernel(module, major)


def _module(package: Package) -> ModuleType | str:
    for path in package.modules:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                # a dependency of the package is missing
                return f"{path} cannot be imported: {error}"
        except Exception as error:  # libraries for another torch or CUDA fail in many ways
            return f"{path} cannot be imported: {type(error).__name__}: {error}"
    missing = f"{package.requirement} is not installed"
    try:
        kernels = importlib.import_module("kernels")
    except ImportError:
        return missing
    try:
        # The build for this torch and GPU is in build/NAME of the repository's folder.
        build = kernels.install_kernel(package.repository, version=1, local_files_only=True)
        built: ModuleType = kernels.get_local_kernel(build.parent.parent)
    except Exception as error:  # it is not in the cache, or has no build for this torch
        return f"{missing}, nor is {package.repository} in the cache of kernels: {error}"
    # In the hub's builds, the functions are in a module of this name, or at the top.
    return getattr(built, package.modules[0].rsplit(".", 1)[1], built)


def _lacking(function: object, names: list[str]) -> str | None:
    """Return a text about those of the arguments `names` that `function` does not have.

    The result is None if the function has all arguments, and "" if `function` is not callable.
    """
    if not callable(function):
        return ""
    parameters = inspect.signature(function_of(function)).parameters
    lacking = [name for name in names if name not in parameters]
    return f" with the arguments {', '.join(lacking)}" if lacking else None


MAX_HEAD_DIM = 256


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Return the reason why this backend cannot compute these operands, or None if it can.

    The reason begins with the name of an argument or of the backend.
    """
    backend = 'the backend "flash_attn"'
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda:
        actual = f"{q.dtype} on {q.device}"
        return f"q must be bf16 or fp16 on a CUDA device for {backend}, got {actual}"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        limit = f"head dims of at most {MAX_HEAD_DIM}"
        actual = f"{q.shape[-1]} and {v.shape[-1]}"
        return f"q and v must have {limit} for {backend}, got {actual}"
    major = gpu_major(q.device)
    reasons = [load_package(name, major) for name in PACKAGES]
    if all(isinstance(reason, str) for reason in reasons):
        return f"{backend} needs a package: {'; '.join(map(str, reasons))}"
    return None


def prepared(q: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> VarlenBlock:
    device = device_of(q)
    kernels = {x: kernel_for(HeadDims.of(q, v), options, x, device) for x in (False, True)}
    return VarlenBlock(kernels, q, v, slices)


def kernel_for(
    operands: HeadDims, options: CallOptions, has_dlse: bool, device: torch.device
) -> VarlenKernel | None:
    """Return the kernel of the best installed package that computes these operands.

    The result is None if no installed package can compute them. `has_dlse` says whether lse has a
    gradient.
    """
    major = gpu_major(device)
    for name in PACKAGES:
        kernel = load_package(name, major)
        if not isinstance(kernel, str) and kernel.takes(operands, options, has_dlse):
            return kernel
    return None
