"""Measure the time in which `python -m seqpar plan` recommends how to train on a cluster.

Each case is a new process, as a user starts it: imports are included, and caches are empty.
`seconds` is wall-clock time, which other programs on the machine lengthen, and `cpu` the CPU time
of the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from typing import Any

import numpy as np

from benchmarks import harness

MODEL = "llama-8b"


def packed(tokens: int) -> list[int]:
    """Return documents of log-normal lengths whose sum is `tokens`."""
    lengths = np.random.default_rng(0).lognormal(8.5, 1.2, tokens // 4096).astype(int)
    ends = np.minimum(np.cumsum(lengths), tokens)
    return [int(x) for x in np.diff(np.r_[0, ends[ends < tokens], tokens])]


CASES = {
    ("1x8-h100", "one document"): [2**17],
    ("8x8-h100", "one document"): [2**20],
    ("8x8-h100", "packed"): packed(2**20),
    ("128x8-h100", "one document"): [2**20],
    ("128x8-h100", "packed"): packed(2**24),
    ("2048x8-h100", "packed"): packed(2**28),
}


def row_of(cluster: str, documents: str) -> dict[str, Any]:
    lengths = CASES[cluster, documents]
    command = [sys.executable, "-m", "seqpar", "plan", "--model", MODEL, "--cluster", cluster]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:  # longer than a command line
        file.write(",".join(map(str, lengths)))
        file.flush()
        return timed([*command, "--lengths", file.name, "--json"], cluster, documents, lengths)


def timed(command: list[str], cluster: str, documents: str, lengths: list[int]) -> dict[str, Any]:
    before, start = os.times(), time.perf_counter()
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, after = time.perf_counter() - start, os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])  # user and system time of children
    ways = json.loads(run.stdout)
    return {
        "cluster": cluster,
        "documents": documents,
        "tokens": sum(lengths),
        "number": len(lengths),
        "seconds": seconds,
        "cpu": cpu,
        "ways": len(ways),
        "simulated": sum(x["longest"] > 0 for x in ways),
        "best": ways[0]["name"],
    }


def measure(_: Namespace) -> dict[str, Any]:
    rows = [row_of(*case) for case in CASES]
    cells = []
    for case, row in zip(CASES, rows, strict=True):
        figures = f"{row['seconds']:.1f}", f"{row['cpu']:.1f}", str(row["ways"])
        cells.append([*case, *figures, str(row["simulated"]), row["best"]])
    head = ["cluster", "documents", "seconds", "CPU seconds", "ways", "simulated", "best"]
    print(harness.table(head, cells))
    return {"model": MODEL, "rows": rows}


if __name__ == "__main__":
    harness.run("recommendation-time", __doc__, {}, measure, canary_is="none")
