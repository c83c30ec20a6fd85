"""Compile every shipped kernel configuration ahead of time, without a GPU, and report what the compiler made of it.

`python -m tests.aot [--architecture sm_90] [--kind forward]` prints a line of JSON for each, and fails if one breaks its
gate. Run it without TRITON_INTERPRET.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from seqpar.kernels import flash_attention, lightning_attention
from seqpar.kernels.flash_attention.backward import flash_backward_kv, flash_backward_q
from seqpar.kernels.flash_attention.forward import flash_forward
from seqpar.kernels.lightning_attention.recurrence import lightning_recurrence
from seqpar.kernels.lightning_attention.states import lightning_carry, lightning_scan, lightning_states
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NVIDIA = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
FLASH = {"forward": flash_forward, "backward_kv": flash_backward_kv, "backward_q": flash_backward_q}
LIGHTNING = {"recurrence": lightning_recurrence, "states": lightning_states, "carry": lightning_carry, "scan": lightning_scan}
KERNELS = FLASH | LIGHTNING
TYPES = {  # of arguments that are neither operands nor integers
    "*fp32": "partial_out lse delta dq dk dv sinks between initial states final before",
    "*fp64": "partial_lse log_decay",
    "*i32": "full cut row_positions column_positions",
    "*i64": "segments chains lengths",
    "fp32": "scale cap gradient_scale state_scale",
}
TYPES = {name: kind for kind, names in TYPES.items() for name in names.split()}
OPERANDS = {"q", "k", "v", "out", "dout", "x", "y", "z"}


def shipped(architecture):
    """(precision, width, kind, configuration) of all that is shipped for an architecture."""
    for (name, precision, width), row in flash_attention.configs.TABLE.items():
        if name == architecture:
            yield from ((precision, width, *pair) for pair in zip(flash_attention.configs.KINDS, row, strict=True))
    for (name, precision, width), row in lightning_attention.configs.TABLE.items():
        if name == architecture:
            yield from ((precision, width, *pair) for pair in zip(lightning_attention.configs.KINDS, row, strict=True))
            if (precision, width) == ("single", 64):
                yield precision, width, "scan", lightning_attention.configs.SCAN


def variants(kind, config):
    """(flags, warps, stages) of the launches that a configuration may be used for, by name."""
    if kind in LIGHTNING:
        launches = lightning_variants(kind, config)
        return {name: (flags, config.warps, config.stages) for name, flags in launches.items()}
    flags = {"SOFTCAP": False, "FLIP": False}
    if kind == "backward_kv":
        flags |= {"REDUCE_DQ": False}
    if kind == "forward":
        flags |= {"PARTIAL": True, "FINAL": True, "SINKS": False, "SPECIALISE": False}
    if config.cut is None:
        return {"fused": (flags | {"FULL": True, "CUT": True}, config.warps, config.stages)}
    full = flags | {"FULL": True, "CUT": False}
    if kind == "forward":
        full |= {"SPECIALISE": config.specialise}
    launches = {
        "full": (full, config.warps, config.stages),
        "cut": (flags | {"FULL": False, "CUT": True}, *config.cut),
    }
    if kind == "forward":
        launches["split"] = (flags | {"FULL": True, "CUT": True}, *config.cut)
    return launches


def lightning_variants(kind, config):
    """The flags of a kernel's uses, by name: one head to each, or from the end with the queries of a group of eight."""
    if kind == "scan":
        return {"forward": {"REVERSE": False}}
    if kind == "carry":
        return {"forward": {"SHARING": 1, "REVERSE": False, "ADD": True}}
    alone, group = {"MEMBERS": 1, "REVERSE": True}, {"MEMBERS": 8, "REVERSE": True}
    if kind == "states":
        return {"group": group}
    more = {"SHARING": 1, "INITIAL": True}
    if config.depth < 256:  # but for adding to out, the kernel of the dim to which it cuts
        return {"reverse": alone | more}
    return {"forward": alone | more | {"REVERSE": False}, "reverse": alone | more, "group": group | more}


def constants_of(kind, config, width, dtype):
    """The compile-time arguments that follow from a configuration."""
    if kind in FLASH:
        return flash_attention.configs.constants(config, width, width, dtype, config.tma)
    if kind == "scan":
        return {"BLOCK": lightning_attention.configs.SCAN_BLOCK}
    tile, depth = config.tile(width), min(config.depth, width)
    sizes = {"D": width, "DV": width, "BLOCK_D": tile if kind == "states" else depth, "BLOCK_DV": tile}
    more = {"FROM": width - depth} if kind == "recurrence" else {}
    return lightning_attention.configs.constants(config, dtype) | sizes | more


def compile_kernel(architecture, precision, width, kind, config, flags, warps, stages):
    kernel, element = KERNELS[kind], {"half": "bf16", "single": "fp32"}[precision]
    dtype = {"half": torch.bfloat16, "single": torch.float32}[precision]
    constants = constants_of(kind, config, width, dtype) | flags
    signature, attributes = {}, {}
    other = "s_v" if flags.get("REVERSE") else "s_d"  # of the states' strides that which is not 1: some are transposed
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == other:
            signature[name] = "i32"
        elif name.endswith("_d") or name == "s_v":  # rows are contiguous
            signature[name], constants[name] = "constexpr", 1
        elif name == "tiles" and kind in FLASH:
            signature[name] = "*i32"
        elif name in OPERANDS:
            signature[name] = f"*{element}"
        else:
            signature[name] = TYPES.get(name, "i32")
        strides = r"(q|k|v|o|g|p|dq|dk|dv|x|y|z)_[bth]|" + other
        if signature[name].startswith("*") or re.fullmatch(strides, name):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=TARGETS[architecture], options=options)


def report(compiled, architecture):
    """Shared memory, warps, registers, spilled bytes, instructions that touch local memory in innermost loops, and HGMMA."""
    result = {"shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    if architecture == "gfx942":
        return result
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", cubin)
        sass = _tool("cuobjdump", "-sass", cubin)
    return result | {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled": max(spilled_bytes(sass, "STL"), spilled_bytes(sass, "LDL")),
        "spills in loops": spills_in_loops(sass),
        "HGMMA": len(re.findall(r"\bHGMMA", sass)),
    }


def broken_gates(found):
    """What a shipped configuration must not do; on gfx942 it need only compile, within its shared memory."""
    architecture, config = found["architecture"], found["config"]
    wrong = [f"{found['shared']} bytes of shared memory"] if found["shared"] > SHARED_LIMIT[architecture] else []
    if architecture == "gfx942":
        return wrong
    if found["spilled"] > 64 or found["spills in loops"]:
        wrong.append(f"{found['spilled']} bytes spilled, {found['spills in loops']} times in inner loops")
    if architecture == "sm_90" and found["precision"] == "half" and config["rows"] >= 64 and not found["HGMMA"]:
        wrong.append("no HGMMA")  # whose tiles have at least 64 rows
    if config.get("specialise") and found["launch"] == "full" and found["warps"] != 3 * config["warps"]:
        wrong.append(f"{found['warps']} warps: not specialised")  # the loading warps and twice the computing ones
    return wrong


def spilled_bytes(sass, instruction):
    """The bytes of all local stores (STL) or loads (LDL), as `ptxas -v` counts them."""
    widths = re.findall(rf"\b{instruction}(?:\.\w+)*?(?:\.(64|128))?\s", sass)
    return sum(int(width or 32) // 8 for width in widths)


def spills_in_loops(sass):
    """How many local loads and stores lie in innermost loops; a loop is what a backward branch spans."""
    local, loops = [], []
    for line in sass.splitlines():
        match = re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*);", line)
        if not match:
            continue
        address, text = int(match[1], 16), match[2]
        if re.search(r"\b(LDL|STL)\b", text):
            local.append(address)
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address:
            loops.append((int(branch[1], 16), address))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return sum(any(start <= address <= stop for start, stop in inner) for address in local)


def _tool(name, *arguments):
    done = subprocess.run([NVIDIA / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", choices=TARGETS)
    parser.add_argument("--kind", choices=KERNELS)
    chosen, wrong = parser.parse_args(), []
    for architecture in TARGETS if chosen.architecture is None else [chosen.architecture]:
        for precision, width, kind, config in shipped(architecture):
            if chosen.kind not in (None, kind):
                continue
            for name, launch in variants(kind, config).items():
                made = compile_kernel(architecture, precision, width, kind, config, *launch)
                case = {"architecture": architecture, "precision": precision, "width": width, "kind": kind, "launch": name}
                found = case | {"config": dataclasses.asdict(config)} | report(made, architecture)
                found["wrong"] = broken_gates(found)
                wrong += found["wrong"]
                print(json.dumps(found), flush=True)
    print(f"triton {triton.__version__}: {len(wrong)} gates broken", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
