"""`--compare`: train on several processes and on one, and compare the losses."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from train_lm import Plans

TOLERANCE = 1e-6  # relative, in fp32; correct code drifts about 3e-7 over 60 steps


def compare(options: argparse.Namespace, plans: Plans) -> int:
    """Run all trainings, print the table and draw the losses.

    Returns the exit code: 1 if a training's losses differ from the first training's.
    """
    console = Console(width=None if sys.stdout.isatty() else 130)
    results = {}
    columns = (
        TextColumn("{task.description:26s}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    # In a log file, a progress bar would appear only after all runs.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for label, plan in plans.items():
            task = progress.add_task(label, total=options.steps, loss="")
            results[label] = run(options, *plan, partial(show, progress, task))
            if not console.is_terminal:
                speed = statistics.median(results[label][0]["speeds"])
                loss = results[label][0]["losses"][-1]
                console.print(f"{label}: {options.steps} steps, {described(loss, speed)}")
    reference = next(iter(results.values()))
    console.print(table(options, plans, results))
    if not options.inject_fault:
        options.out.mkdir(parents=True, exist_ok=True)
        plot(results, options.out / "loss.png")
        console.print(f"loss curves: {options.out / 'loss.png'}")
    faults = {label: departure(result, reference) for label, result in results.items()}
    wrong = {label: found for label, found in faults.items() if not found <= TOLERANCE}
    for label, found in wrong.items():
        by = f"by {found:.1e}, more than {TOLERANCE:.0e}"
        console.print(f"[red]{label}: its loss differs from one process's {by}")
    return 1 if wrong else 0


def show(progress: Progress, task: TaskID, line: dict[str, Any]) -> None:
    """Show a training's progress."""
    text = described(line["loss"], line["tokens/s"])
    progress.update(task, completed=line["step"], loss=text)


def described(loss: float, speed: float) -> str:
    return f"loss {loss:.4f}, {speed:,.0f} tokens/s"


def run(
    options: argparse.Namespace, attention: str, processes: int, threads: int, progress: Any
) -> list[dict[str, Any]]:
    """Run one training in separate processes, and return each rank's report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command.append(f"--nproc-per-node={processes}")
        command += [
            sys.argv[0],
            f"--attention={attention}",
            f"--threads={threads}",
            f"--report={report}",
        ]
        given = {name: getattr(options, name) for name in options.passed_on}
        command += [
            f"--{name.replace('_', '-')}={value}"
            for name, value in given.items()
            if value is not None
        ]
        if not options.inject_fault:
            command.append("--measure-memory")
        elif attention != "sdpa":
            command.append(f"--inject-fault={options.inject_fault}")
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    progress(json.loads(line))
            if process.wait() != 0:
                errors.seek(0)
                raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()}")
        return json.loads(report.read_text())


def departure(result: list[dict[str, Any]], reference: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of the losses, over all steps; inf for NaN."""
    pairs = zip(result[0]["losses"], reference[0]["losses"], strict=True)
    return max(
        abs(loss - expected) / expected if loss == loss else float("inf")
        for loss, expected in pairs
    )


def table(options: argparse.Namespace, plans: Plans, results: dict[str, Any]) -> Table:
    """Return a table with one row per training."""
    reference = next(iter(results.values()))
    shown = Table(
        title=f"{options.steps} steps of {options.seq_len} tokens, "
        + (f"balanced by {options.balance}" if options.balance else f"{options.layout} layout")
    )
    for heading in (
        "",
        "last loss",
        "differs by",
        "tokens/s",
        "% of ideal",
        "sent / step",
        "peak / rank",
        "longest in 2 GB / rank",
    ):
        shown.add_column(heading, justify="left" if not heading else "right")
    speed = {label: statistics.median(result[0]["speeds"]) for label, result in results.items()}
    # The first run has one process with one thread. Its speed times the number of cores is ideal.
    ideal = speed[next(iter(results))]
    for label, result in results.items():
        _, processes, threads = plans[label]
        shown.add_row(
            label,
            f"{result[0]['losses'][-1]:.6f}",
            f"{departure(result, reference):.1e}",
            f"{speed[label]:,.0f}",
            f"{speed[label] / ideal / processes / threads:.0%}",
            f"{max(statistics.mean(rank['sent']) for rank in result) / 2**20:.1f} MiB",
            f"{max(rank['peak'] for rank in result) / 2**20:,.0f} MiB",
            f"{min(rank['longest'] for rank in result):,} tokens",
        )
    return shown


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw all losses over the steps into the file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (label, result) in enumerate(results.items()):
        axes.plot(
            range(1, len(result[0]["losses"]) + 1),
            result[0]["losses"],
            label=label,
            lw=1 + 5 * (1 - i / len(results)),  # so that all of several equal curves can be seen
            alpha=0.7,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=120)
