"""Measure strategies and their peers on this machine or cluster, over lengths, heads and masks."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any

from seqpar.bench import sweep
from seqpar.bench.results import gate, plots, report
from seqpar.bench.results.results import SweepResults, alone
from seqpar.bench.workers.ranks import RankProcesses, StartError, follow
from seqpar.bench.workloads.workloads import DTYPES, PASSES, PRESETS, SCALINGS, Options
from seqpar.comm.launch import place
from seqpar.commands import seconds
from seqpar.costs.profile import harness


def _words(text: str) -> list[str]:
    return text.split(",")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    lists: dict[str, Any] = {"type": _words, "metavar": "A,B"}
    parser.add_argument("--strategies", help="which ones; all by default", **lists)
    parser.add_argument(
        "--peers", help='others beside ours, by default those installed, or "none"', **lists
    )
    parser.add_argument("--lengths", help="tokens, of a batch or of a rank (--scaling)", **lists)
    parser.add_argument(
        "--scaling",
        choices=SCALINGS,
        help="lengths are of a batch, whatever the ranks (strong, the default), of a rank (weak)",
    )
    parser.add_argument("--heads", help="query heads:KV headsxdim, as in 64:8x128", **lists)
    parser.add_argument(
        "--masks", help="such as causal, full, window:1024, prefix, causal-pile", **lists
    )
    parser.add_argument("--ranks", help="how many", **lists)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--passes", help=f"of {', '.join(PASSES)}", **lists)
    parser.add_argument("--preset", choices=PRESETS, help="heads, masks and dtype of others")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=7, help="in which contenders take turns")
    parser.add_argument(
        "--limit", type=seconds, default=600.0, help="seconds that a point may take"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("seqpar-bench"), help="for results; goes on with them"
    )
    parser.add_argument("--again", action="store_true", help="try again what failed")
    parser.add_argument("--threshold", type=Path, help="rules that the figures must keep")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write; the status is 1 if one of ours is wrong, or a rule is broken."""
    for package in ("rich", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"it needs {package}: pip install 'seqpar[bench]'")
    where = place()
    options = Options.of(vars(arguments), where)
    if where is not None and where.rank:
        follow(where, options.device)
        return 0
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with (
            RankProcesses(where, max(options.ranks), options.device) as ranks,
            alone(arguments.folder),
        ):
            rules = [] if arguments.threshold is None else gate.read(arguments.threshold, options)
            results = SweepResults.open(arguments.folder, options, arguments.again)
            with harness.progress(sweep.steps(options)) as begin:
                sweep.run(options, results, ranks, begin)
            return conclude(results, rules, arguments.json)
    except StartError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def conclude(results: SweepResults, rules: list[gate.Rule], as_json: bool) -> int:
    """Write figures, pictures and a page; print them; return the status."""
    report.complete(results.rows)
    broken = gate.broken(rules, results.rows)
    results.found["broken"] = broken
    results.write()
    folder = results.path.parent
    pictures = plots.draw(results.rows, folder)
    (folder / "bench.md").write_text(report.markdown(results.found, pictures))
    if as_json:
        print(json.dumps(results.found, indent=1))
    else:
        report.show(results.found)
        print(f"\n{results.path}, {folder / 'bench.md'} and {len(pictures)} pictures")
    for text in broken:
        print(f"broken: {text}", file=sys.stderr)
    return 1 if broken or sweep.faulty(results.rows) else 0
