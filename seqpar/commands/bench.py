"""Benchmark strategies and other libraries on this machine or cluster."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from pathlib import Path

from seqpar.bench import sweep
from seqpar.bench.results import gate, plots, sweep_report
from seqpar.bench.results.results_file import SweepResults, alone
from seqpar.bench.workers.ranks import RankProcesses, StartError, follow
from seqpar.bench.workloads.workloads import PASSES, PRESETS, SCALINGS, SweepOptions
from seqpar.comm.launch import place
from seqpar.commands import seconds
from seqpar.core.options import DTYPES, dtype_name
from seqpar.costs.profile import harness


def _words(text: str) -> list[str]:
    return text.split(",")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add_list(name: str, help: str) -> None:
        parser.add_argument(name, help=help, type=_words, metavar="A,B")

    add_list("--strategies", help="strategies to measure; default: all")
    add_list(
        "--peers", help='other libraries to measure; default: those installed; "none": no others'
    )
    add_list("--lengths", help="tokens per batch or per rank (see --scaling), as in 4096,512K,1M")
    parser.add_argument(
        "--scaling",
        choices=SCALINGS,
        help="strong (default): lengths are per batch; weak: lengths are per rank",
    )
    add_list("--heads", help="query heads:KV headsxhead dim, as in 64:8x128")
    add_list("--masks", help="masks such as causal, full, window:1024, prefix, causal-pile")
    add_list("--ranks", help="numbers of ranks")
    parser.add_argument("--dtype", choices=DTYPES, type=dtype_name, help="dtype of q, k and v")
    add_list("--passes", help=f"any of {', '.join(PASSES)}")
    parser.add_argument(
        "--preset", choices=PRESETS, help="heads, masks, dtype and passes of a published benchmark"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contender")
    parser.add_argument(
        "--limit", type=seconds, default=600.0, help="seconds allowed for each point"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("seqpar-bench"),
        help="folder for results; an earlier sweep in it continues",
    )
    parser.add_argument("--again", action="store_true", help="retry points that failed")
    parser.add_argument("--threshold", type=Path, help="file of rules that the figures must keep")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Measure the sweep, and print and write results. Returns 1 if a result of seqpar is wrong or a
    rule is broken.
    """
    for package in ("rich", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"it needs {package}: pip install 'seqpar[bench]'")
    where = place()
    options = SweepOptions.of(vars(arguments), where)
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
    """Write and print figures, plots and a page. Returns the exit status."""
    sweep_report.complete(results.rows)
    broken = gate.broken(rules, results.rows)
    results.content["broken"] = broken
    results.write()
    folder = results.path.parent
    pictures = plots.draw(results.rows, folder)
    (folder / "bench.md").write_text(sweep_report.markdown(results.content, pictures))
    if as_json:
        print(json.dumps(results.content, indent=1))
    else:
        sweep_report.show(results.content)
        print(f"\n{results.path}, {folder / 'bench.md'} and {len(pictures)} pictures")
    for text in broken:
        print(f"broken: {text}", file=sys.stderr)
    return 1 if broken or sweep.faulty(results.rows) else 0
