"""The figures of a sweep's points, as a table, as Markdown and in its results file."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seqpar.bench.workloads.contenders import ONE, divisor
from seqpar.bench.workloads.masks import PackedBatch
from seqpar.bench.workloads.workloads import Workload
from seqpar.costs.profile.harness import quartiles

Row = dict[str, Any]
MAX_QUARTILE_SPREAD = 0.1  # relative to the median; a wider spread is reported
COLUMNS = {
    "contender": "contender",
    "seconds": "ms",
    "spread": "quartiles",
    "tokens_per_second": "tokens/s",
    "tflops_per_device": "TFLOP/s a device",
    "of_ideal": "% of ideal",
    "exposed_seconds": "exposed, ms",
    "bytes": "MiB sent",
    "memory": "MiB at most",
    "error": "error",
}
MIB = 2**20
FILE_WIDTH = 150  # characters of a table that is not shown on a terminal


def figures(row: Row, one: Row, area: Callable[[], int]) -> dict[str, Any] | None:
    """Return the figures of a point, None of one that failed; what is not known of it is None.

    `area()` is the mask's, which of what could not be measured may be too large to count.

    * seconds: the median over rounds of the slowest rank's; spread: their quartiles;
    * tokens_per_second, of all ranks; tflops_per_device: by the mask's area;
    * of_ideal: how long the one-device kernel takes for 1/P of the work, over `seconds`;
    * exposed_seconds: of communication; exposed_share: of the step that they are part of, which
      is not one of those timed; exposed: of what communication takes alone;
    * bytes: sent by the rank that sends most; memory: bytes that a rank holds at most, operands
      included;
    * error: the largest RMS error over the RMS of what it should be; of_one_device: the largest
      over the one-device kernel's.
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
    of_all = row["contender"] != ONE or workload.ranks == 1
    found: dict[str, Any] = {"seconds": seconds, "spread": list(quartiles(row["seconds"]))}
    found["tokens_per_second"] = workload.tokens / seconds if of_all else None
    flops = workload.flops(area()) / (
        workload.ranks if of_all else divisor(workload.ranks, workload.kv_heads)
    )
    found["tflops_per_device"] = flops / seconds / 1e12
    found["of_ideal"] = None if ideal is None or not of_all else ideal / seconds
    found["ideal_seconds"] = ideal
    found |= {"exposed_seconds": None, "exposed_share": None, "exposed": None}
    if exposure is not None:
        hidden = exposure["without_communication"]
        found["exposed_seconds"] = max(0.0, exposure["total"] - hidden)
        found["exposed_share"] = found["exposed_seconds"] / exposure["total"]
        found["exposed"] = exposure["fraction"]
    for name in ("bytes", "memory"):
        found[name] = None if None in costs[name] else max(costs[name])
    found["error"], found["of_one_device"] = (
        row["check"].get(name) for name in ("relative", "of_one_device")
    )
    return found


def complete(rows: list[Row]) -> None:
    """Put the figures of all rows into them."""
    area = functools.cache(lambda mask, tokens: PackedBatch.of(mask, tokens).area)
    ones = {_workload(row): row for row in rows if row["contender"] == ONE}
    for row in rows:
        mask, tokens = row["workload"]["mask"], row["workload"]["tokens"]
        of_row = functools.partial(area, mask, tokens)
        row["figures"] = figures(row, ones[_workload(row)], of_row)


def _workload(row: Row) -> Workload:
    return Workload(**row["workload"])


def cells(row: Row) -> list[str]:
    """Return what a table says of a point, by column."""
    found = row["figures"]
    if found is None:
        return [row["contender"], row["failed"] or "not measured yet"]
    low, high = found["spread"]

    def shown(name: str, scale: float, form: str) -> str:
        return "" if found[name] is None else format(found[name] * scale, form)

    return [
        row["contender"],
        shown("seconds", 1e3, ",.2f"),
        f"{low * 1e3:,.2f}–{high * 1e3:,.2f}",
        shown("tokens_per_second", 1, ",.0f"),
        shown("tflops_per_device", 1, ",.3f"),
        shown("of_ideal", 100, ".1f"),
        shown("exposed_seconds", 1e3, ",.2f"),
        shown("bytes", 1 / MIB, ",.2f"),
        shown("memory", 1 / MIB, ",.1f"),
        shown("error", 1, ".1e"),
    ]


def grouped(rows: list[Row]) -> dict[Workload, list[Row]]:
    """Return the rows by their workload, in order."""
    found: dict[Workload, list[Row]] = {}
    for row in rows:
        found.setdefault(_workload(row), []).append(row)
    return found


def notes(found: dict[str, Any]) -> list[str]:
    """Return what a reader of the figures should know: slow links, few cores, unsteady minutes."""
    said = [f"A slow pair of {name}." for name in found["links"]["slow"]] if found["links"] else []
    cores, options = found["environment"]["cores"], found["options"]
    crowded = [ranks for ranks in options["ranks"] if ranks > cores]
    if options["device"] == "cpu" and crowded and len(hosts(found)) < 2:
        listed = ", ".join(map(str, crowded))
        said.append(f"{listed} ranks share {cores} cores: these are not times of so many devices.")
    spreads = {
        _workload(row): (row["figures"]["spread"][1] - row["figures"]["spread"][0])
        / row["figures"]["seconds"]
        for row in found["rows"]
        if row["contender"] == ONE and row["figures"] is not None
    }
    unsteady = [x for x, spread in spreads.items() if spread > MAX_QUARTILE_SPREAD]
    if unsteady:
        worst = max(unsteady, key=lambda x: spreads[x])
        many = f"{len(unsteady)} of {len(spreads)} workloads"
        said.append(
            f"The machine was unsteady on {many}: the quartiles of one device are over "
            f"{MAX_QUARTILE_SPREAD:.0%} of its median apart, at most {spreads[worst]:.0%}, "
            f"at {worst}."
        )
    return said


def hosts(found: dict[str, Any]) -> list[str]:
    """Return the hosts that ranks were on."""
    places = found["links"]["places"] if found["links"] else []
    return sorted({place["host"] for place in places})


def markdown(found: dict[str, Any], pictures: list[Path]) -> str:
    """Return a page with the hardware, all points, and the pictures."""
    here, options = found["environment"], found["options"]
    versions = ", ".join(f"{name} {x}" for name, x in here["versions"].items())
    places = found["links"]["places"] if found["links"] else []
    devices = sorted({place["device"] for place in places} - {"cpu"}) or [here["cpu"]]
    ranks = "several hosts" if len(hosts(found)) > 1 else "one host"
    lines = [
        "# Sweep",
        "",
        f"{', '.join(devices)}, {here['cores']} cores, ranks on {ranks}. Python {here['python']}, "
        f"{versions}; commit {here['commit'] or 'unknown'}, {here['date']}. Medians of "
        f"{options['rounds']} rounds in which contenders take turns, on the slowest rank. 100% of "
        "ideal is the one-device kernel on 1/P of the work. Answers were compared with fp64 first.",
        "",
        *(line for note in notes(found) for line in (note, "")),
    ]
    if places and found["links"]["pairs"]:
        lines += [
            "## Links",
            "",
            "| ranks | between | latency, us | GB/s each way |",
            "|---|---|---|---|",
        ]
        for x in found["links"]["pairs"]:
            between = f"{x['between']} | {x['latency'] * 1e6:,.0f} | {x['rate'] / 1e9:.2f}"
            lines.append(f"| {x['ranks'][0]}, {x['ranks'][1]} | {between} |")
        lines.append("")
    for workload, rows in grouped(found["rows"]).items():
        lines += [f"## {workload}", ""]
        measured = [row for row in rows if row["figures"] is not None]
        if measured:
            lines += ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
            lines += ["| " + " | ".join(cells(row)) + " |" for row in measured]
            lines.append("")
        failed = [": ".join(cells(row)) for row in rows if row["figures"] is None]
        lines += [f"* {text.replace('|', '/')}" for text in failed] + [""] * bool(failed)
    lines += [line for x in pictures for line in (f"![{x.stem}]({x.name})", "")]
    return "\n".join(lines)


def show(found: dict[str, Any]) -> None:
    """Print a table of each workload."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else FILE_WIDTH)
    for workload, rows in grouped(found["rows"]).items():
        table = Table(title=str(workload), title_justify="left", box=box.SIMPLE)
        for i, name in enumerate(COLUMNS.values()):
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
    for note in notes(found):
        console.print(escape(note))
