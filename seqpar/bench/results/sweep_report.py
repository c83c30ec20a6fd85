"""The figures of a sweep's points, as tables for a terminal and a Markdown page."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from seqpar.bench.results.results_file import Figures, Row, SweepFile
from seqpar.bench.workloads.contenders import ONE, divisor
from seqpar.bench.workloads.sweep_batches import PackedBatch
from seqpar.bench.workloads.workloads import Workload
from seqpar.costs.profile.harness import quartiles

MAX_QUARTILE_SPREAD = 0.1  # the spread is reported if spread / median is above this
MIB = 2**20
# The columns after the contender: (figure, heading, factor, format).
_COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("seconds", "ms", 1e3, ",.2f"),
    ("spread", "quartiles", 1e3, ",.2f"),
    ("tokens_per_second", "tokens/s", 1, ",.0f"),
    ("tflops_per_device", "TFLOP/s per device", 1, ",.3f"),
    ("of_ideal", "% of ideal", 100, ".1f"),
    ("exposed_seconds", "exposed, ms", 1e3, ",.2f"),
    ("bytes", "MiB sent", 1 / MIB, ",.2f"),
    ("memory", "peak MiB", 1 / MIB, ",.1f"),
    ("error", "error", 1, ".1e"),
)
HEADINGS = ["contender", *(heading for _, heading, _, _ in _COLUMNS)]
FILE_WIDTH = 150  # the width, in characters, of a table that is not printed to a terminal


def figures(row: Row, one: Row, area: Callable[[], int]) -> Figures | None:
    """Return the figures of a point, or None if the point failed. Unknown figures are None.

    A point is a strategy or a library that computes one batch on P ranks. Each point is timed in
    several rounds.

    `area()` returns the number of (query, key) pairs that the mask allows. `area` is called only
    for measured points, because it can take too long for batches that are too large to measure.

    * seconds: the median over rounds of the slowest rank's seconds; spread: the quartiles over
      rounds;
    * tokens_per_second: the tokens of all ranks per second; tflops_per_device: the FLOP/s of a
      device, where FLOPs follow from the number of (query, key) pairs;
    * of_ideal: the time of the kernel on one device for 1/P of the work, divided by `seconds`;
    * exposed_seconds: the seconds of communication that computation does not hide. Exposed seconds
      are measured in a separate step. exposed_share: exposed_seconds divided by the seconds of the
      separate step; exposed: exposed_seconds divided by the seconds of communication without
      computation;
    * bytes: the bytes sent by the rank that sends the most; memory: the peak bytes of memory on a
      rank, operands included;
    * error: the largest relative RMS error of a result, such as out or dq; of_one_device: the
      largest ratio between the error of a result and the error of the same result of the kernel on
      one device.
    """
    if row["failed"] is not None or not row["seconds"] or row["costs"] is None:
        return None
    workload = Workload(**row["workload"])
    seconds = statistics.median(row["seconds"])
    ideal = None
    if one["seconds"] and one["failed"] is None:
        share = divisor(workload.ranks, workload.kv_heads) / workload.ranks
        ideal = statistics.median(one["seconds"]) * share
    exposure, costs = row["costs"]["exposure"], row["costs"]
    # Whether this contender computes all of the work, not only one device's part.
    computes_all = row["contender"] != ONE or workload.ranks == 1
    devices = workload.ranks if computes_all else divisor(workload.ranks, workload.kv_heads)
    exposed_seconds = exposed_share = None
    if exposure is not None:
        exposed_seconds = max(0.0, exposure["total"] - exposure["without_communication"])
        exposed_share = exposed_seconds / exposure["total"]
    check = row["check"] or {}
    return {
        "seconds": seconds,
        "spread": list(quartiles(row["seconds"])),
        "tokens_per_second": workload.tokens / seconds if computes_all else None,
        "tflops_per_device": workload.flops(area()) / devices / seconds / 1e12,
        "of_ideal": None if ideal is None or not computes_all else ideal / seconds,
        "ideal_seconds": ideal,
        "exposed_seconds": exposed_seconds,
        "exposed_share": exposed_share,
        "exposed": None if exposure is None else exposure["fraction"],
        "bytes": largest(costs["bytes"]),
        "memory": largest(costs["memory"]),
        "error": check.get("relative"),
        "of_one_device": check.get("of_one_device"),
    }


def largest(figures: list[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return max(known) if len(known) == len(figures) else None


def complete(rows: list[Row]) -> None:
    area = functools.cache(lambda mask, tokens: PackedBatch.of(mask, tokens).area)
    ones = {_workload(row): row for row in rows if row["contender"] == ONE}
    for row in rows:
        workload = _workload(row)
        area_of_row = functools.partial(area, workload.mask, workload.tokens)
        row["figures"] = figures(row, ones[workload], area_of_row)


def _workload(row: Row) -> Workload:
    return Workload(**row["workload"])


def cells(row: Row) -> list[str]:
    known = row["figures"]
    if known is None:
        return [row["contender"], row["failed"] or "not measured yet"]
    texts = [row["contender"]]
    for name, _, factor, form in _COLUMNS:
        numbers = known[name] if name == "spread" else [known[name]]
        texts.append("–".join(format(x * factor, form) for x in numbers if x is not None))
    return texts


def grouped(rows: list[Row]) -> dict[Workload, list[Row]]:
    groups: dict[Workload, list[Row]] = {}
    for row in rows:
        groups.setdefault(_workload(row), []).append(row)
    return groups


def notes(content: SweepFile) -> list[str]:
    """Return warnings about the figures: slow links, too few cores, or times that vary between
    rounds.
    """
    slow_pairs = content["links"]["slow"] if content["links"] else []
    warnings = [f"A slow pair of {pair}." for pair in slow_pairs]
    cores, options = content["environment"]["cores"], content["options"]
    crowded = [ranks for ranks in options["ranks"] if ranks > cores]
    if options["device"] == "cpu" and crowded and len(hosts(content)) < 2:
        listed = ", ".join(map(str, crowded))
        warnings.append(
            f"{listed} ranks share {cores} cores: these are not times of that many devices."
        )
    spreads = {}
    for row in content["rows"]:
        if row["contender"] == ONE and row["figures"] is not None:
            low, high = row["figures"]["spread"]
            spreads[_workload(row)] = (high - low) / row["figures"]["seconds"]
    unsteady = [x for x, spread in spreads.items() if spread > MAX_QUARTILE_SPREAD]
    if unsteady:
        worst = max(unsteady, key=lambda x: spreads[x])
        share = f"{len(unsteady)} of {len(spreads)} workloads"
        warnings.append(
            f"The machine was unsteady on {share}: the quartiles of one device are over "
            f"{MAX_QUARTILE_SPREAD:.0%} of its median apart, at most {spreads[worst]:.0%}, "
            f"at {worst}."
        )
    return warnings


def hosts(content: SweepFile) -> list[str]:
    places = content["links"]["places"] if content["links"] else []
    return sorted({place["host"] for place in places})


def markdown(content: SweepFile, pictures: list[Path]) -> str:
    here, options, links = content["environment"], content["options"], content["links"]
    versions = ", ".join(f"{name} {x}" for name, x in here["versions"].items())
    places = links["places"] if links else []
    devices = sorted({place["device"] for place in places} - {"cpu"}) or [here["cpu"]]
    ranks = "several hosts" if len(hosts(content)) > 1 else "one host"
    lines = [
        "# Sweep",
        "",
        f"{', '.join(devices)}, {here['cores']} cores, ranks on {ranks}. Python {here['python']}, "
        f"{versions}; commit {here['commit'] or 'unknown'}, {here['date']}. Medians of "
        f"{options['rounds']} interleaved rounds, on the slowest rank. 100% of ideal is the "
        "one-device kernel on 1/P of the work. Results were first compared with fp64.",
        "",
        *(line for note in notes(content) for line in (note, "")),
    ]
    if links and links["pairs"]:
        lines += ["## Links", "", "| ranks | between | latency, us | GB/s each way |"]
        lines.append("|---|---|---|---|")
        for pair in links["pairs"]:
            low, high = pair["ranks"]
            speed = f"{pair['latency'] * 1e6:,.0f} | {pair['rate'] / 1e9:.2f}"
            lines.append(f"| {low}, {high} | {pair['between']} | {speed} |")
        lines.append("")
    for workload, rows in grouped(content["rows"]).items():
        lines += [f"## {workload}", ""]
        measured = [row for row in rows if row["figures"] is not None]
        if measured:
            lines += [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
            lines += [*(f"| {' | '.join(cells(row))} |" for row in measured), ""]
        failed = [": ".join(cells(row)) for row in rows if row["figures"] is None]
        lines += [f"* {text.replace('|', '/')}" for text in failed] + [""] * bool(failed)
    lines += [line for x in pictures for line in (f"![{x.stem}]({x.name})", "")]
    return "\n".join(lines)


def show(content: SweepFile) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else FILE_WIDTH)
    for workload, rows in grouped(content["rows"]).items():
        table = Table(title=str(workload), title_justify="left", box=box.SIMPLE)
        for i, name in enumerate(HEADINGS):
            table.add_column(name, justify="right" if i else "left", no_wrap=not i)
        failed = []
        for row in rows:
            if row["figures"] is None:
                failed.append(": ".join(cells(row)))
            else:
                table.add_row(*map(escape, cells(row)))
        console.print(table if table.rows else f"\n{workload}")
        for text in failed:
            console.print(escape(f"  {text}"))
    for note in notes(content):
        console.print(escape(note))
