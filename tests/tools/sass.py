"""Read what ptxas made of a kernel: registers, spills, and instructions.

SASS is the assembly of an NVIDIA GPU.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"


def usage(cubin):
    """Return what a kernel uses of the hardware, by name.

    The values are registers, spilled bytes, instructions that access local memory in innermost
    loops, and HGMMA instructions.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        resources, sass = _cuobjdump("-res-usage", file), _cuobjdump("-sass", file)
    return {
        "registers": int(re.search(r"REG:(\d+)", resources)[1]),
        "spilled": max(spilled_bytes(sass, "STL"), spilled_bytes(sass, "LDL")),
        "spills in loops": spills_in_loops(sass),
        "HGMMA": len(re.findall(r"\bHGMMA", sass)),
    }


def spilled_bytes(sass, instruction):
    """Return the bytes of all local stores (STL) or loads (LDL), as `ptxas -v` counts them."""
    widths = re.findall(rf"\b{instruction}(?:\.\w+)*?(?:\.(64|128))?\s", sass)
    return sum(int(width or 32) // 8 for width in widths)


def spills_in_loops(sass):
    """Return how many local loads and stores are in innermost loops.

    A loop is the code between a backward branch and its target.
    """
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
    innermost = [
        loop
        for loop in loops
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    return sum(any(start <= address <= stop for start, stop in innermost) for address in local)


def _cuobjdump(option, file):
    done = subprocess.run(
        [BINARIES / "cuobjdump", option, file], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr
