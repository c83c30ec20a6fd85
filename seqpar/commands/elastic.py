"""Train on ranks that can die."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from seqpar.comm.private_store import serve_private_store
from seqpar.elastic.launcher import Launcher, LauncherLimits
from seqpar.elastic.messages import VARIABLE

# All ranks are on this host, so gloo uses the loopback interface, whatever the environment says.
_GLOO = {"GLOO_SOCKET_IFNAME": "lo"}
LIMITS = {
    "spares": "more processes, which wait to replace dead ones",
    "restarts": "processes that may be started in place of dead ones",
    "min_ranks": "the fewest ranks of a group",
    "wait": "seconds for which a group that lacks ranks waits for spares",
    "patience": "seconds after which a rank that does not rejoin is killed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, required=True, help="processes of a full group")
    for name, text in LIMITS.items():
        default, option = getattr(LauncherLimits(1), name), f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=text)
    parser.add_argument("script", help="a Python file, which calls seqpar.elastic.steps")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the training on this host. Returns the exit code, which is 0 if the training is done."""
    limits = LauncherLimits(**{name: getattr(arguments, name) for name in ("ranks", *LIMITS)})
    store, folder = serve_private_store()
    command = [sys.executable, arguments.script, *arguments.arguments]

    def start(number: int) -> subprocess.Popen[bytes]:
        # The second variable says that the launcher keeps the store, for error messages.
        variables = {VARIABLE: f"{number} {folder}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return subprocess.Popen(command, env=os.environ | _GLOO | variables)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return Launcher(store, start, limits).run()
