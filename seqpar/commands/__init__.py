"""The commands of `python -m seqpar`, one file each with `add_arguments` and `run`.

`seqpar/__main__.py` lists the commands and calls them.
"""

import argparse
import math
from pathlib import Path


def seconds(text: str) -> float:
    """Parse an argument in seconds, or raise the error that argparse shows."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0, at most 86400, got {text!r}"
        )
    return value


def add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS")
    parser.add_argument("--keys", type=Path, help="the folder of keys; see keygen")
