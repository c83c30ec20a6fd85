"""Make the keys of attention servers and their clients."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqpar.servers.transport.curve_keys import generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR")


def run(arguments: argparse.Namespace) -> int:
    """Make the keys, and print which files a server and a client need."""
    if not arguments.folder:
        raise ValueError("folder must be one, got ''")  # an empty path is the working directory
    for file in generate(Path(arguments.folder)):
        print(file)
    print("a server needs server.* and trusted/; a client needs client.* and server.public")
    return 0
