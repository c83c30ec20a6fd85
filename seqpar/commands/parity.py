"""Find the first place where two runs of a model differ, from recordings of `seqpar.parity`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="also draw which tokens differ in which module into FILE (.png, .svg or .pdf)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 1 if the runs differ."""
    report = compare(arguments.first, arguments.second, arguments.again, _progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(report)
    if arguments.json is not None:
        text = json.dumps(report.json(), indent=1)
        with _named_faults("json", arguments.json):
            Path(arguments.json).write_text(text, encoding="utf-8")
    if arguments.picture is not None:
        with _named_faults("picture", arguments.picture):
            report.plot(arguments.picture)
    return 0 if report.first is None else 1


@contextmanager
def _named_faults(option: str, file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: {file} cannot be written: {error.strerror}") from None


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:78]}", end="", file=sys.stderr, flush=True)
