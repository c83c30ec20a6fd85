"""Find the first place where two runs of a model differ, from recordings of `seqpar.parity`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from seqpar.parity import compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Ends with status 0 if the runs agree, 1 if they differ by more than rounding, and 2 for "
        "recordings that cannot be compared."
    )
    parser.add_argument("first", type=Path, help="the folder of the reference's recording")
    parser.add_argument("second", type=Path, help="the folder of the recording to judge")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="FOLDER",
        help="a second recording of the first run, which measures how large rounding is",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all findings to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if the runs differ."""
    report = compare(arguments.first, arguments.second, arguments.again, _progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(report)
    if arguments.json is not None:
        try:
            Path(arguments.json).write_text(json.dumps(report.json(), indent=1), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"json: {arguments.json}: {error.strerror}") from None
    return 0 if report.first is None else 1


def _progress(text: str) -> None:
    """Show what is being read on the last line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:78]}", end="", file=sys.stderr, flush=True)
