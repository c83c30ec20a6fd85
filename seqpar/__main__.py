"""Run a command: `python -m seqpar serve`, `status`, `check`, `bench` and others."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

COMMANDS = {
    "serve": "serve attention to trainers, in a process of its own",
    "status": "say how attention servers do",
    "check": "check that attention servers answer right, over each transport, and how fast",
    "keygen": "make the keys of an attention server and its clients",
    "bench": "measure strategies and their peers on this machine or cluster",
    "plan": "recommend how to train a model on a cluster, by simulation",
    "explore": "draw a strategy on your lengths: layout, work, bytes and predicted time",
    "info": "say what is here: devices, versions, settings, and what is supported on them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments say, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m seqpar")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, description=text, add_help=False)
    name = parser.parse_known_args(argv)[0].command
    try:
        command, one = load(name)
    except ImportError as error:
        print(f"{name} needs {error.name}: pip install 'seqpar[serve]'", file=sys.stderr)
        return 2
    rest = list(sys.argv[1:] if argv is None else argv)
    rest.remove(name)
    try:
        status: int = command.run(one.parse_args(rest))
    except (ValueError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def load(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """Return a command's module, and the parser of its arguments."""
    command = import_module(f"seqpar.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m seqpar {name}", description=COMMANDS[name])
    command.add_arguments(parser)
    return command, parser


if __name__ == "__main__":
    sys.exit(main())
