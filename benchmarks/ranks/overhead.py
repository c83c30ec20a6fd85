"""Measure the host's work in a call, and compare it with a bare loop and an older commit.

On a GPU the host's work is hidden only if it is shorter than the kernels. The setting is the middle
one of 8 ranks, 32 documents, 32 query heads and 8 KV heads, causal: each strategy's forward and
backward, from the second call of a layout on. Messages are not sent, kernels do not run, and
tensors are so small that copies take no time (`overhead_rank.py`). Three contenders alternate, call
by call and round by round: ours; the floor, a bare loop that posts the same messages and makes the
same number of copies, fills, merges of partial results and launches; and our code at an older
commit. Figures are medians in microseconds. Nothing is computed here; tests check the results of
the same code.
"""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import harness

ROOT = Path(__file__).parents[2]
STRATEGIES = (
    *("ring", "all_gather", "token_ring", "ulysses", "usp"),
    *("lasp2 all_gather", "lasp2 scan"),
)
LAYOUTS = ("zigzag", "contiguous")
PASSES = ("forward", "backward")
BEFORE = "b65fccd"  # the last commit before calls kept most of their plans
Samples = dict[str, list[float]]  # microseconds: each round's median over its calls


class Rank:
    """A process that times calls of the code in a tree of sources, with a kernel."""

    def __init__(self, tree: Path, kernel: str) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("overhead_rank.py"))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [*command, str(tree), kernel], stdin=pipe, stdout=pipe, text=True, cwd=tree
        )

    def turn(self, strategy: str, layout: str, calls: int) -> dict[str, Any]:
        """Return the times of this number of calls, and their counts of device work."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([strategy, layout, calls]), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{strategy} on {layout} raised: no figures")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def sources_at(commit: str, folder: Path) -> Path:
    """Write the library's sources at a commit into a folder. Returns the folder."""
    command = ["git", "archive", commit, "seqpar", "triton_kernels"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        raise SystemExit(f"--before: {found.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def take_turns(
    ours: Rank, before: Rank, strategies: list[str], rounds: int, calls: int
) -> list[dict[str, Any]]:
    """Return a row for each strategy, layout and pass: its counts and samples."""
    cases = [(strategy, layout) for layout in LAYOUTS for strategy in strategies]
    counts: dict[tuple[str, str], Any] = {}
    samples: dict[tuple[str, str], Samples] = {case: {} for case in cases}
    with harness.progress(rounds * len(cases)) as begin:
        for _ in range(rounds):
            for case in cases:
                begin(", ".join(case))
                found, old = (rank.turn(*case, calls) for rank in (ours, before))
                counts[case] = found["counts"]
                times = found["times"] | {
                    f"{key} before": values
                    for key, values in old["times"].items()
                    if not key.endswith("floor")
                }
                for key, values in times.items():
                    samples[case].setdefault(key, []).append(round(statistics.median(values), 1))
    return [
        row(strategy, layout, direction, counts[strategy, layout], samples[strategy, layout])
        for strategy, layout in cases
        for direction in PASSES
    ]


def row(
    strategy: str, layout: str, direction: str, counts: dict[str, Any], samples: Samples
) -> dict[str, Any]:
    """Return a row of the results: the case, medians, and their ratios."""
    mine = {
        key.removeprefix(f"{direction} "): values
        for key, values in samples.items()
        if key.startswith(direction)
    }
    medians = {key: statistics.median(values) for key, values in mine.items()}
    return {
        "strategy": strategy,
        "layout": layout,
        "pass": direction,
        "work": counts[direction],
        "microseconds": medians,
        "of_floor": medians["strategy"] / medians["floor"],
        "less_than_before": medians["strategy before"] / medians["strategy"],
        "samples": mine,
    }


def table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'µs':40s}{'floor':>8s}{'strategy':>10s}{'of floor':>10s}{'before':>9s}{'less':>7s}"
        f"{'call':>9s}{'before':>9s}"
    )
    for found in rows:
        name = f"{found['strategy']}, {found['layout']}, {found['pass']}"
        µs = found["microseconds"]
        print(
            f"{name:40s}{µs['floor']:8.0f}{µs['strategy']:10.0f}{found['of_floor']:10.2f}"
            f"{µs['strategy before']:9.0f}{found['less_than_before']:7.1f}"
            f"{µs['call']:9.0f}{µs['call before']:9.0f}"
        )


def measure(options: Namespace, kernel: str = "triton") -> dict[str, Any]:
    """Return the rows of the strategies `options.only`, computed with a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        old = sources_at(options.before, Path(folder))
        ours, before = Rank(ROOT, kernel), Rank(old, kernel)
        rows = take_turns(ours, before, options.only, options.rounds, options.calls)
        ours.end()
        before.end()
    table(rows)
    return {"before": options.before, "rows": rows}


ARGUMENTS = {
    "--before": (BEFORE, "the older commit"),
    "--rounds": 15,
    "--calls": (20, "calls of a strategy in each round"),
    "--only": ([*STRATEGIES], None, STRATEGIES),
}

if __name__ == "__main__":
    harness.run("overhead", __doc__, ARGUMENTS, measure, canary_is="recorded")
