"""Make keys of attention servers."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqpar.servers.transport.curve_keys import generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("folder", metavar="DIR")


def run(arguments: argparse.Namespace) -> int:
    """Make the keys, and say where they are needed."""
    if not arguments.folder:
        raise ValueError("folder must be one, got ''")  # which would be the working directory
    for file in generate(Path(arguments.folder)):
        print(file)
    print("a server needs server.* and trusted/, a client client.* and server.public")
    return 0
