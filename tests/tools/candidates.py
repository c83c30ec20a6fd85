"""Compile candidates for the tuner ahead of time, without a GPU, and list those that pass the
gates.

`python -m tests.tools.candidates` compiles pairs of tile sizes for sm_90 and head dim 128, in half
precision, with and without tensor descriptors. A candidate is listed if none of its launches spills
registers in a loop or breaks another gate of `aot_table.py`. The list is candidates.json in
triton_kernels/flash_attention/, in the section of the installed version of Triton. Run it without
TRITON_INTERPRET.

The tuner does not time three kinds of launches, and they are not compiled: launches with ALiBi,
launches with descriptors from the host, and launches of tiles whose columns several programs share.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import itertools
import os

import triton
from seqpar.kernels.flash_attention.configs import Config

from tests.tools import aot, aot_table

FILE = aot_table.ROOT / "triton_kernels/flash_attention/candidates.json"
ARCHITECTURE, PRECISION = "sm_90", "half"
WIDTHS = (128,)
KEY = "architecture", "precision", "width", "kind"
FIGURES = "registers", "spilled", "spills in loops", "shared"
KERNELS = [kernel.fn.__name__ for kernel in aot.FLASH.values()]


def grid():
    """Yield alternatives: configurations that are compiled in order until one passes the gates.

    A tile has 16 rows per warp. The second alternative launches full and cut blocks separately, for
    the case that one launch of both breaks a gate.
    """
    for rows, columns in itertools.product((128, 64), (128, 64, 32)):
        for stages, tma in ((2, True), (2, False), (3, True)):
            warps = rows // 16
            fused = Config(rows, columns, warps, stages, tma)
            yield fused, dataclasses.replace(fused, cut_resources=(warps, 2))


def launches(width, kind, config):
    """Yield the cases of the launches that the tuner times."""
    for case in aot.cases(ARCHITECTURE, PRECISION, width, kind, config):
        is_of_split_tiles = config.separate and case.launch == "fused"
        if not is_of_split_tiles and not case.launch.endswith((aot.SLOPES, aot.HOST)):
            yield case


def row_of(width, kind, config):
    """Return the fields of a candidate's row that can be known without a compiler."""
    digests = "".join(case.row()["arguments"] for case in launches(width, kind, config))
    digest = hashlib.sha256(digests.encode()).hexdigest()[:12]
    names = dict(zip(KEY, (ARCHITECTURE, PRECISION, width, kind), strict=True))
    return names | {"config": dataclasses.asdict(config), "arguments": digest}


def compiled(task):
    """Return the row of the first alternative that passes all gates, or None, and what failed."""
    width, kind, alternatives = task
    failed = []
    for config in alternatives:
        worst = dict.fromkeys(FIGURES, 0)
        for case in launches(width, kind, config):
            row = aot.report(case)
            if wrong := aot_table.broken_gates(row):
                failed.append(f"{kind} {width} {config}: {case.launch}: {', '.join(wrong)}")
                break
            worst = {name: max(worst[name], row[name]) for name in FIGURES}
        else:
            return row_of(width, kind, config) | worst, failed
    return None, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    chosen = parser.parse_args()
    tasks = [(width, kind, x) for width in WIDTHS for kind in aot.FLASH for x in grid()]
    rows = []
    with concurrent.futures.ProcessPoolExecutor(chosen.jobs) as pool:
        for row, failed in pool.map(compiled, tasks):
            print("\n".join([*failed, str(row)]), flush=True)
            rows += [row] if row is not None else []
    sources = aot_table.sources_hash(KERNELS)
    aot_table.write(triton.__version__, sources, rows, FILE)


if __name__ == "__main__":
    main()
