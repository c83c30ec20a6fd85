"""Compare attention servers of this checkout with those of another one, whose transport differs.

Each checkout has a server, and a pool in another process. Both run in this Python environment, with
one thread per process. Calls of both alternate in small blocks, over a Unix socket and over
loopback TCP with keys, which each checkout makes itself:

- payloads of 64 MiB in tasks without work;
- tasks of 128 tokens;
- with --training, two trainers and two servers of `examples/train_disaggregated.py`.

A round's time is the median of its block. The ratios and differences are medians over rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from benchmarks import harness

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]
PLACES = {"Unix socket": False, "TCP with keys": True}  # whether there are keys
BLOCKS = {"payload": 4, "task": 40}  # calls
MEBIBYTES, LEAST_BANDWIDTH = 64, 0.6  # of the other transport's
MOST_SECONDS_MORE, MOST_TRAINING = 0.5e-3, 1.1  # per small task; of the other's training


def environment_of(checkout: Path) -> dict[str, str]:
    """Return the environment of a process that imports seqpar from a checkout."""
    return os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}


class Side:
    """The server and the pool of one checkout.

    Attributes:
        transport: the name of its transport.
    """

    def __init__(self, checkout: Path, folder: Path, has_keys: bool) -> None:
        address = "tcp://127.0.0.1:*" if has_keys else f"ipc://{folder}/server"
        arguments = json.dumps([address, str(folder / "keys") if has_keys else None])
        # With -P, the folder of the program is not searched for modules.
        command = [sys.executable, "-P", str(Path(__file__).with_name("transport_side.py"))]
        self._process = subprocess.Popen(
            [*command, arguments],
            env=environment_of(checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.transport = self._hear()

    def seconds(self, kind: str, times: int) -> float:
        """Return the median seconds of so many calls of a kind."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, times]) + "\n")
        self._process.stdin.flush()
        return statistics.median(self._hear())

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends at the end of its input


def calls(
    checkouts: Mapping[str, Path], rounds: int, begin: Callable[[str], None]
) -> Iterator[Row]:
    """Yield the seconds of payloads and of tasks at each place."""
    for place, has_keys in PLACES.items():
        with ExitStack() as stack:
            sides: dict[str, Side] = {}
            for name, checkout in checkouts.items():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seqpar-")))
                sides[name] = stack.enter_context(Side(checkout, folder, has_keys))
            for kind, block in BLOCKS.items():
                seconds: dict[str, list[float]] = {name: [] for name in sides}
                for turn, name in harness.turns(sides, rounds + 1):
                    begin(f"{place}: {kind}, round {turn} of {rounds}")
                    found = sides[name].seconds(kind, block)
                    seconds[name] += [found] if turn else []  # the first round warms up
                transports = {name: side.transport for name, side in sides.items()}
                yield {"place": place, "kind": kind, "transports": transports, "seconds": seconds}


@contextmanager
def two_servers(checkout: Path) -> Iterator[str]:
    """Run two servers of a checkout; yield a file with their addresses, as an address."""
    with tempfile.TemporaryDirectory(prefix="seqpar-") as folder, ExitStack() as stack:
        addresses = [f"ipc://{folder}/{i}" for i in range(2)]
        for address in addresses:
            command = [sys.executable, "-P", "-m", "seqpar", "serve", "--bind", address]
            server = stack.enter_context(
                subprocess.Popen(
                    [*command, "--threads", "1"],
                    env=environment_of(checkout),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
            stack.callback(server.kill)
            assert server.stdout is not None
            server.stdout.readline()
        listed = Path(folder) / "addresses"
        listed.write_text("\n".join(addresses))
        yield f"file://{listed}"


def training(
    checkouts: Mapping[str, Path], rounds: int, steps: int, begin: Callable[[str], None]
) -> Row:
    """Return the seconds of trainings with each checkout, without their first step."""
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    for turn, name in harness.turns(checkouts, rounds):
        begin(f"training, round {turn + 1} of {rounds}")
        example = checkouts[name] / "examples/train_disaggregated.py"
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", str(example), f"--steps={steps}"]
        with two_servers(checkouts[name]) as servers:
            done = subprocess.run(
                [*command, f"--servers={servers}"],
                env=environment_of(checkouts[name]),
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise SystemExit(f"the training failed:\n{done.stderr}")
        lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
        own = [line["seconds"] for line in lines if line["trainer"] == 0]
        seconds[name].append(sum(own[1:]))
    return {"place": "Unix socket", "kind": "training", "seconds": seconds}


def with_target(row: Row) -> Row:
    """Add what was found, and whether it is within its bound."""
    pairs = list(zip(row["seconds"]["ours"], row["seconds"]["theirs"], strict=True))
    if row["kind"] == "payload":
        found, limit = statistics.median(y / x for x, y in pairs), LEAST_BANDWIDTH
        what, bound, met = "bandwidth, over theirs", "at least", found >= limit
    elif row["kind"] == "task":
        found, limit = statistics.median(x - y for x, y in pairs), MOST_SECONDS_MORE
        what, bound, met = "seconds more per task", "at most", found <= limit
    else:
        found, limit = statistics.median(x / y for x, y in pairs), MOST_TRAINING
        what, bound, met = "seconds of a training, over theirs", "at most", found <= limit
    return row | {"what": what, "found": found, "bound": bound, "limit": limit, "met": met}


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        times = [f"{1e3 * statistics.median(row['seconds'][x]):.2f}" for x in ("ours", "theirs")]
        target = f"{row['bound']} {row['limit']:g}"
        met = "yes" if row["met"] else "no"
        lines.append([row["place"], row["what"], *times, f"{row['found']:.3g}", target, met])
    head = ["place", "what", "ours, ms", "theirs, ms", "found", "target", "met"]
    return harness.table(head, lines)


def measure(options: Namespace) -> Row:
    if not options.against:
        raise SystemExit("--against DIR must be given: another checkout of seqpar")
    checkouts = {"ours": ROOT, "theirs": Path(options.against).resolve()}
    blocks = 2 * len(PLACES) * len(BLOCKS) * (options.rounds + 1)
    trainings = 2 * options.trainings
    with harness.progress(blocks + trainings) as begin:
        rows = list(calls(checkouts, options.rounds, begin))
        if trainings:
            rows.append(training(checkouts, options.trainings, options.steps, begin))
    rows = [with_target(row) for row in rows]
    print(table(rows))
    return {"shape": {"MiB of a payload": MEBIBYTES, "calls of a block": BLOCKS}, "rows": rows}


ARGUMENTS = {
    "--against": ("", "another checkout of seqpar, with another transport"),
    "--rounds": (15, "blocks of each kind of call"),
    "--trainings": (3, "trainings with each checkout"),
    "--steps": (20, "steps of a training"),
}

if __name__ == "__main__":
    harness.run("servers-transport", __doc__, ARGUMENTS, measure)
