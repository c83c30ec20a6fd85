"""Make keys of attention servers."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqpar.servers.keys import generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("folder", type=Path, metavar="DIR")


def run(arguments: argparse.Namespace) -> int:
    """Make the keys, and say where they are needed."""
    for file in generate(arguments.folder):
        print(file)
    print("a server needs server.* and trusted/, a client client.* and server.public")
    return 0
