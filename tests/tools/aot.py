"""Compile every shipped kernel configuration ahead of time, without a GPU.

`python -m tests.tools.aot` prints what the compiler made of each launch, as one line of JSON. It
fails if a launch breaks a gate. Otherwise it writes all rows to the table of `aot_table.py`, under
the version of Triton. With `--architecture sm_90`, `--kind forward` or `--width 64`, it compiles
only these launches and writes nothing. With `--markdown`, it prints the table of docs/kernels.md
instead. Run it without TRITON_INTERPRET.

A launch is one use of a kernel, with its compile-time arguments. A case is a launch of one
configuration.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import sys

import torch
import triton
from seqpar.kernels import flash_attention, lightning_attention, specialisation
from seqpar.kernels.flash_attention import launching as flash_launching
from seqpar.kernels.flash_attention.backward_kernels import flash_backward_kv, flash_backward_q
from seqpar.kernels.flash_attention.forward_kernels import flash_forward
from seqpar.kernels.lightning_attention.recurrence import lightning_recurrence
from seqpar.kernels.lightning_attention.states import (
    lightning_carry,
    lightning_scan,
    lightning_states,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.tools import aot_table, sass

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FLASH = {"forward": flash_forward, "backward_kv": flash_backward_kv, "backward_q": flash_backward_q}
LIGHTNING = {
    "recurrence": lightning_recurrence,
    "states": lightning_states,
    "carry": lightning_carry,
    "scan": lightning_scan,
}
KERNELS = FLASH | LIGHTNING
NAMES = [kernel.fn.__name__ for kernel in KERNELS.values()]  # names of the kernels' functions
TYPES = {  # type: the arguments that are neither operands nor integers
    "*fp32": "partial_out lse delta dq dk dv sinks slopes between initial states final before",
    "*fp64": "partial_lse log_decay",
    "*i32": "full cut row_positions column_positions",
    "*i64": "segments chains lengths",
    "fp32": "scale cap gradient_scale state_scale",
}
TYPES = {name: kind for kind, names in TYPES.items() for name in names.split()}
SLOPES = ", slopes"  # suffix of the name of a launch with ALiBi slopes
HOST = ", host descriptors"  # suffix of a launch whose descriptors the host makes
NO_DESCRIPTORS = flash_attention.configs.NO_DESCRIPTORS
OPERANDS = {"q", "k", "v", "out", "dout", "x", "y", "z"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch of one shipped configuration."""

    architecture: str
    precision: str  # "half" or "single"
    width: int  # the head dims
    kind: str
    launch: str
    config: flash_attention.Config | lightning_attention.Config
    flags: dict  # compile-time arguments of this launch
    warps: int
    stages: int

    def row(self):
        """Return the fields of the row that can be known without a compiler."""
        names = {name: getattr(self, name) for name in aot_table.KEY}
        described = repr((arguments(self), self.warps, self.stages)).encode()
        digest = hashlib.sha256(described).hexdigest()[:12]
        return names | {"config": dataclasses.asdict(self.config), "arguments": digest}


def shipped(architecture):
    """Yield the cases of all launches that are shipped for an architecture."""
    tables = flash_attention.configs.TABLE, lightning_attention.configs.TABLE
    for table in tables:
        for (name, precision, width), configs in table.items():
            if name == architecture:
                for kind, config in configs._asdict().items():
                    yield from cases(architecture, precision, width, kind, config)
            if name == architecture + NO_DESCRIPTORS and precision == "half":
                for kind, config in configs._asdict().items():
                    yield from cases(architecture, precision, width, kind, config, NO_DESCRIPTORS)
    scan = lightning_attention.configs.SCAN
    yield from cases(architecture, "single", 64, "scan", scan)  # for any head dim


def cases(architecture, precision, width, kind, config, suffix=""):
    """Yield the cases of all launches for which a configuration may be used."""
    for name, (flags, warps, stages) in variants(kind, config, width).items():
        if precision == "single" and name.endswith(SLOPES):
            continue  # in fp32 with slopes, dq of head dim 128 spills in a loop on sm_80
        launch = name + suffix
        yield Case(architecture, precision, width, kind, launch, config, flags, warps, stages)


def variants(kind, config, width):
    """Return {launch: (flags, warps, stages)} of a configuration for head dims of `width`."""
    if kind in LIGHTNING:
        launches = lightning_variants(kind, config)
        return {name: (flags, config.warps, config.stages) for name, flags in launches.items()}
    walks = {"full": (True, False), "cut": (False, True), "fused": (True, True)}
    names = ["full", "cut"] if config.separate else ["fused"]
    if config.separate and kind == "forward":  # a launch of split tiles
        names.append("fused")
    launches = {}
    for name in names:
        has_full, has_cut = walks[name]
        made_by = makers(config, has_full, width)
        for suffix, made in (made_by | {SLOPES: made_by[""]}).items():
            flags = {"HAS_FULL": has_full, "HAS_CUT": has_cut, "SOFTCAP": False, "FLIP": False}
            flags |= {"TMA": made, "ALIBI": suffix == SLOPES}
            if kind == "backward_kv":
                flags |= {"REDUCE_DQ": False}
            if kind == "forward":
                flags |= {"HAS_PARTIAL": True, "HAS_SINKS": False}
            launches[name + suffix] = flags, *config.resources(has_cut)
    return launches


def makers(config, has_full, width):
    """Return configurations by the suffix of their launches' names: one for each maker of
    descriptors.

    A kernel makes its tensor descriptors itself. If it has descriptors, and tiles have one piece,
    there is also a launch for which the host makes them (`has_host_descriptor`).
    """
    one_piece = not flash_attention.configs.pieces(width)[1]
    host = dataclasses.replace(config, host=True)
    has_host = config.tma and has_full and one_piece
    made = {"": config, HOST: host} if has_host else {"": config}
    return {name: x.described(has_full, True, True) for name, x in made.items()}


def lightning_variants(kind, config):
    """Return the flags of a lightning kernel, by the name of its use.

    "group" goes through the sequence from its end, with the states of one head and the queries of a
    group of eight heads.
    """
    if kind == "scan":
        return {"forward": {"REVERSE": False}}
    if kind == "carry":
        return {"forward": {"SHARING": 1, "REVERSE": False, "ADD": True}}
    one_head, group = {"MEMBERS": 1, "REVERSE": True}, {"MEMBERS": 8, "REVERSE": True}
    if kind == "states":
        return {"group": group}
    common = {"SHARING": 1, "HAS_INITIAL": True}
    if config.depth < 256:  # all but adding to out uses the kernel of the dim to which it cuts
        return {"reverse": one_head | common}
    return {
        "forward": one_head | common | {"REVERSE": False},
        "reverse": one_head | common,
        "group": group | common,
    }


def constants(case, dtype):
    """Return all compile-time arguments of a case."""
    config, width = case.config, case.width
    if case.kind in FLASH:
        dim = width - 12 if case.launch.endswith(NO_DESCRIPTORS) else width  # no multiple of 8
        names = [name for name in KERNELS[case.kind].arg_names if name.endswith("_described")]
        described = dict.fromkeys(names) if case.flags["TMA"] != "host" else {}
        sizes = flash_launching.constants(config, dim, dim, dtype, case.flags["TMA"])
        return sizes | case.flags | described
    if case.kind == "scan":
        return {"BLOCK": lightning_attention.configs.SCAN_BLOCK} | case.flags
    block, depth = config.block(width), min(config.depth, width)
    sizes = lightning_attention.configs.constants(config, dtype) | {"D": width, "DV": width}
    sizes |= {"BLOCK_D": block if case.kind == "states" else depth, "BLOCK_DV": block}
    if case.kind == "recurrence":
        sizes["FROM"] = width - depth
    return sizes | case.flags


def arguments(case):
    """Return (signature, compile-time arguments, attributes) of a case's kernel for `ASTSource`."""
    dtype = {"half": torch.bfloat16, "single": torch.float32}[case.precision]
    element = {"half": "*bf16", "single": "*fp32"}[case.precision]
    known = constants(case, dtype)
    # Some states are transposed: this is the name of their stride that is not 1.
    other = "s_v" if case.flags.get("REVERSE") else "s_d"
    dims = "sbt" if case.launch.endswith(NO_DESCRIPTORS) else "sbth"
    aligned = rf"(q|k|v|o|g|p|s|dq|dk|dv|x|y|z)_[{dims}]|{other}"
    width, signature, attributes = known.get("BLOCK_D"), {}, {}
    for i, name in enumerate(KERNELS[case.kind].arg_names):
        if name in known:
            signature[name] = "constexpr"
        elif name == other:
            signature[name] = "i32"
        elif name.endswith("_d") or name == "s_v":  # rows are contiguous
            signature[name], known[name] = "constexpr", 1
        elif name == "tiles":
            signature[name] = "*i32"
        elif name in OPERANDS:
            signature[name] = element
        elif name.endswith("_described"):
            signature[name] = f"tensordesc<{element[1:]}[{known['BLOCK_COLUMNS']}, {width}]>"
        else:
            signature[name] = TYPES.get(name, "i32")
        pointer = signature[name].startswith("*") and name not in specialisation.UNALIGNED
        varies = name in specialisation.VARYING
        if pointer or (re.fullmatch(aligned, name) and not varies):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, known, attributes


def compile_case(case):
    kernel, (signature, known, attributes) = KERNELS[case.kind], arguments(case)
    positions = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions, attrs=attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    return triton.compile(source, target=TARGETS[case.architecture], options=options)


def report(case):
    """Compile a case and return its row of the table."""
    compiled = compile_case(case)
    row = case.row()
    row |= {"shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    return row if case.architecture == "gfx942" else row | sass.usage(compiled.asm["cubin"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", choices=TARGETS)
    parser.add_argument("--kind", choices=KERNELS, nargs="+")
    parser.add_argument("--width", type=int, help="of the head dims")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--markdown", action="store_true", help="print docs/kernels.md's table")
    chosen = parser.parse_args()
    if chosen.markdown:
        print(aot_table.markdown())
        return
    architectures = TARGETS if chosen.architecture is None else [chosen.architecture]
    todo = [case for architecture in architectures for case in shipped(architecture)]
    todo = [case for case in todo if case.kind in (chosen.kind or KERNELS)]
    todo = [case for case in todo if chosen.width in (None, case.width)]
    rows, wrong = [], []
    with concurrent.futures.ProcessPoolExecutor(chosen.jobs) as pool:
        for row in pool.map(report, todo):
            rows.append(row)
            broken = aot_table.broken_gates(row)
            wrong += broken
            print(json.dumps(row | {"wrong": broken}), flush=True)
    print(f"triton {triton.__version__}: {len(wrong)} gates broken", file=sys.stderr)
    whole = all(x is None for x in (chosen.architecture, chosen.kind, chosen.width))
    if whole and not wrong:
        aot_table.write(triton.__version__, aot_table.sources_hash(NAMES), rows)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
