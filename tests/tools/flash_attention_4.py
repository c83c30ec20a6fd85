"""Compile FlashAttention-4's kernels for the calls of every strategy, without a GPU.

`python -m tests.tools.flash_attention_4` needs the extra flash-attn. The counting benchmark runs
one rank of every strategy on meta tensors, and replacements of FlashAttention-4's functions record
the calls. The package then gets the same calls with fake tensors. It compiles its kernels for sm_90
and launches none. The command prints the number of calls and variants of each kind of mask. It
fails if a kind has more than one variant of a kernel.

The package also stores the compiled kernels in the folder that FLASH_ATTENTION_CUTE_DSL_CACHE_DIR
names, if FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1. A process on a GPU with these variables loads
them from there, if it has the same versions of Python, of FlashAttention-4 and of its compiler.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import time
import warnings
from collections import defaultdict
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernels import memory_traffic
from benchmarks.kernels.memory_traffic import CASES, Case

TARGET = {  # the target for which the package compiles without a GPU
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": str(memory_traffic.GPU.processors),
}
MODULE = "flash_attn.cute.interface"
FUNCTIONS = {  # name: the names of its positional arguments
    "_flash_attn_fwd": ("q", "k", "v"),
    "_flash_attn_bwd": ("q", "k", "v", "out", "dout", "lse"),
}
# Profiles and tables of speed have the first sizes; the tests of the default path on a GPU have the
# second sizes.
SIZES = (
    {"TOKENS": 2**14, "HEADS": 32, "KV_HEADS": 8},
    {"TOKENS": 188, "HEADS": 8, "KV_HEADS": 4},
)
OPTIONS = {"causal": {}, "window": {"window_size": (99, 0)}, "full": {"causal": False}}


def cases():
    """Yield the counted cases, and for each strategy cases with more masks and without
    determinism."""
    for case in CASES.values():
        yield case, OPTIONS["causal"]
    for strategy in dict.fromkeys(case.strategy for case in CASES.values()):
        for documents, options in itertools.product((1, 32), OPTIONS.values()):
            if (
                documents == 1 or "window_size" not in options
            ):  # Triton computes some calls with windows
                for deterministic in (True, False):
                    yield Case(strategy, documents, {"deterministic": deterministic}), options


def recorded():
    """Return the distinct calls of FlashAttention-4, each as a name and its described arguments."""
    calls = {}  # a dict as an ordered set

    def recording(name, stand_in):
        @functools.wraps(stand_in)
        def call(*args, **named):
            arguments = dict(zip(FUNCTIONS[name], args, strict=True)) | named
            calls[name, tuple((key, described(x)) for key, x in arguments.items())] = None
            return stand_in(*args, **named)

        return call

    stand_ins = {name: recording(name, getattr(memory_traffic, name)) for name in FUNCTIONS}
    for sizes in SIZES:
        with mock.patch.multiple(memory_traffic, **stand_ins, **sizes):
            for case, options in cases():
                memory_traffic.count(case, **options)
    return list(calls)


def described(x):
    """Return an argument, or the shape, strides and dtype of a tensor."""
    return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


def fake(x):
    """Return an argument from its description; a tensor becomes a fake tensor on a GPU."""
    if isinstance(x, tuple):
        shape, strides, dtype = x
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
    return x


def kind(name, arguments):
    """Return in words everything on which a variant of a kernel may depend."""
    way = {"_flash_attn_fwd": "forward", "_flash_attn_bwd": "backward"}[name]
    heads, kv_heads = (arguments[x][0][-2] for x in "qk")
    sides = [x for x in ("left", "right") if arguments[f"window_size_{x}"] is not None]
    mask = "causal" if arguments["causal"] else " and ".join(sides) or "full"
    words = [way, mask, "batch" if arguments["cu_seqlens_q"] is None else "documents"]
    words.append(f"{heads // kv_heads} query heads per KV head")
    if not arguments.get("deterministic", True):
        words.append("not deterministic")
    return ", ".join(words)


def compiled(calls):
    """Let the package compile the kernels of each call; return the figures of each kind of mask."""
    package = importlib.import_module(MODULE)
    found = defaultdict(lambda: {"calls": 0, "variants": 0, "seconds": 0.0})
    # The package passes some fake tensors to its compiler through DLPack, and PyTorch then asks for
    # the current device.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        for name, described_arguments in calls:
            function, arguments = getattr(package, name), dict(described_arguments)
            figures = found[kind(name, arguments)]
            before, began = len(function.compile_cache.cache), time.perf_counter()
            function(**{key: fake(x) for key, x in arguments.items()})
            figures["seconds"] += time.perf_counter() - began
            figures["variants"] += len(function.compile_cache.cache) - before
            figures["calls"] += 1
    return found


def main():
    os.environ |= TARGET
    warnings.simplefilter("ignore")  # of the package
    began = time.perf_counter()
    calls = recorded()
    print(f"{len(calls)} calls recorded in {time.perf_counter() - began:.0f} s", flush=True)
    found = compiled(calls)
    for name, x in sorted(found.items()):
        print(f"{name}: {x['calls']} calls, {x['variants']} variants, {x['seconds']:.1f} s")
    several = [name for name, x in found.items() if x["variants"] > 1]
    print(f"kinds with several variants: {', '.join(several) or 'none'}")
    return int(bool(several))


if __name__ == "__main__":
    sys.exit(main())
