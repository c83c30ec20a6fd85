"""Run a command: `python -m seqpar serve`, `status`, `check`, `bench` and others."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from seqpar import __version__

COMMANDS = {
    "serve": "run an attention server for trainers",
    "status": "show the state of attention servers",
    "check": "check the results and the speed of attention servers, over each transport",
    "keygen": "make, rotate and revoke the certificates of attention servers and clients",
    "bench": "benchmark strategies and other libraries on this machine or cluster",
    "plan": "recommend how to train a model on a cluster, by simulation: seqpar.recommend",
    "recipe": "print a training script for a published model, with predicted time and memory",
    "explore": "draw a strategy on your lengths: layout, work, bytes and predicted time",
    "parity": "find the first place where two recorded runs of a model differ",
    "elastic": "train on ranks of which some may die, with spares or without",
    "info": "report devices, versions and settings, and what is supported on them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the arguments and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m seqpar")
    parser.add_argument("--version", action="version", version=f"seqpar {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, description=text, add_help=False)
    name = parser.parse_known_args(argv)[0].command
    if name is None:
        parser.print_help()
        return 2
    command, command_parser = load(name)
    words = list(sys.argv[1:] if argv is None else argv)
    words.remove(name)
    try:
        status: int = command.run(command_parser.parse_args(words))
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        print(f"{name} needs {error.name}: pip install 'seqpar[serve]'", file=sys.stderr)
        return 2
    except (ValueError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        has_reader = not isinstance(error, BrokenPipeError) or _has_reader()
        _drop_unwritten_output()
        if not has_reader:  # as in `| head`
            return 128 + signal.SIGPIPE
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return status


def _drop_unwritten_output() -> None:
    """Prevent a second error from output that Python would write when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _has_reader() -> bool:
    """Return False if standard output is a pipe that its reader has closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    return not poll.poll(0)


def load(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """Return a command's module and its argument parser."""
    command = import_module(f"seqpar.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m seqpar {name}", description=COMMANDS[name])
    command.add_arguments(parser)
    return command, parser


if __name__ == "__main__":
    sys.exit(main())
