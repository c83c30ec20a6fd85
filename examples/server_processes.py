"""Start trainers and attention servers, kill a server, add a server, and show the effect."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compare import plot
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Line = dict[str, Any]  # a line that a trainer prints after a step
QUIET, DISTURBED = "undisturbed", "one killed, one joins"


class Servers:
    """Server processes on Unix sockets in a folder.

    Attributes:
        file: a file with the address of one server per line, which trainers watch.
        says: the state of each server, by its address.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "addresses"
        self.says: dict[str, str] = {}
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, count: int) -> list[str]:
        """Start this number of servers, and return their addresses when all serve."""
        started = []
        for _ in range(count):
            address = f"ipc://{self.folder}/{len(self._processes)}"
            command = [sys.executable, "-m", "seqpar", "serve", "--bind", address, "--threads", "1"]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._processes.append(process)
            started.append((address, process))
        for address, process in started:
            assert process.stdout is not None
            if not process.stdout.readline():  # a server prints its address when it is ready
                raise SystemExit(f"the server at {address} ended with {process.wait()}")
            self.says[address] = "serves"
        return [address for address, _ in started]

    def list(self, addresses: list[str]) -> None:
        """Write the addresses that trainers use."""
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(addresses))
        new.replace(self.file)

    def replace(self, number: int) -> None:
        """Kill a server with SIGKILL, and add the standby server to the list."""
        addresses = list(self.says)
        self._processes[number].kill()
        self.says[addresses[number]] = "killed"
        self.says[addresses[-1]] = "joined"
        self.list(addresses)

    def end(self) -> None:
        """End all remaining servers."""
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def two_servers() -> Iterator[Servers]:
    """Run two servers that trainers know, and a third on standby.

    The third is already running, because a short training could end before a process has started.
    """
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder))
        try:
            *known, other = servers.start(3)
            servers.list(known)
            servers.says[other] = "on standby"
            yield servers
        finally:
            servers.end()


def run(
    options: argparse.Namespace, disturbed: bool, show: Callable[[Line, Servers], None]
) -> tuple[list[float], str]:
    """Train once. Returns each step's loss, and an error text, or "" if the run is valid."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.trainers}", sys.argv[0]]
    command += [f"--{name}={getattr(options, name)}" for name in ("steps", "tokens", "text")]
    losses, last = [], dict[int, Line]()
    with two_servers() as servers, tempfile.TemporaryFile("w+") as errors:
        command.append(f"--servers=file://{servers.file}")
        joins = list(servers.says)[-1]
        if disturbed:
            command.append(f"--joins={joins}")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for text in process.stdout:
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            last[line["trainer"]] = line
            if line["trainer"] == 0:
                losses.append(line["loss"])
            if disturbed and line["trainer"] == 0 and line["step"] == 1 + options.steps // 4:
                servers.replace(0)  # during the next step, which has begun
            show(line, servers)
        if process.wait() != 0:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()}")
        if not disturbed:
            return losses, ""
        tasks = sum(line["tasks"].get(joins, 0) for line in last.values())
        return (
            losses,
            "" if tasks else "the server that joined got no task, because it was too late",
        )


class Screen:
    """A display of the progress of each run, and of the tasks that each server computed."""

    def __init__(self, options: argparse.Namespace, runs: list[str]) -> None:
        columns = (
            TextColumn("{task.description:22s}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.console = Console(width=None if sys.stdout.isatty() else 110)
        self._progress = Progress(*columns, console=self.console)
        add = self._progress.add_task
        self._tasks = {x: add(x, total=options.steps, text="", start=False) for x in runs}
        self._last: dict[int, Line] = {}
        self.live = Live(self._progress, console=self.console)

    def begin(self, label: str) -> None:
        """Begin the display of a run."""
        self._last = {}
        self._progress.start_task(self._tasks[label])

    def show(self, label: str, line: Line, servers: Servers) -> None:
        """Show a trainer's report."""
        self._last[line["trainer"]] = line
        if line["trainer"] == 0:
            text = f"loss {line['loss']:.4f}, {line['seconds']:.2f} s per step"
            self._progress.update(self._tasks[label], completed=line["step"], text=text)
        counts: dict[str, int] = {}
        for last in self._last.values():
            for address, tasks in last["tasks"].items():
                counts[address] = counts.get(address, 0) + tasks
        table = Table(title=f"processes that computed attention: {label}")
        for heading in ("", "tasks", "share", ""):
            table.add_column(heading, justify="right" if heading else "left")
        total = max(1, sum(counts.values()))
        names = {address: f"server {i}" for i, address in enumerate(servers.says)}
        for address in [*names, "home"]:
            tasks = counts.get(address, 0)
            says = servers.says.get(address, "the trainers themselves")
            name = names.get(address, address)
            table.add_row(name, f"{tasks:,}", f"{tasks / total:.0%}", says)
        self.live.update(Group(self._progress, table))


def demonstrate(options: argparse.Namespace) -> int:
    """Train with servers that leave and join. Returns the exit code: 1 after an error."""
    runs = [QUIET, DISTURBED] if options.compare else [DISTURBED]
    screen, losses, wrong = Screen(options, runs), dict[str, list[float]](), ""
    say = screen.console.print
    with screen.live:
        for label in runs:
            screen.begin(label)
            show = lambda line, servers, label=label: screen.show(label, line, servers)  # noqa: E731
            losses[label], wrong = run(options, label == DISTURBED, show)
            if not screen.console.is_terminal:  # the display would appear only after all runs
                say(f"{label}: {options.steps} steps, loss {losses[label][-1]:.4f}")
    if not screen.console.is_terminal:
        say()
    if wrong:
        say(f"[red]{wrong}: give more --steps")
        return 1
    if not options.compare:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "loss_servers.png"
    plot({label: [{"losses": found}] for label, found in losses.items()}, path)
    say(f"loss curves: {path}")
    pairs = zip(losses[QUIET], losses[DISTURBED], strict=True)
    departing = [step for step, (one, other) in enumerate(pairs, 1) if one != other]
    if departing:
        say(f"[red]the losses first differ in step {departing[0]}")
        return 1
    say(f"the losses of all {options.steps} steps are the same, bit for bit")
    return 0
