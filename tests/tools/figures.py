"""Rows (what, where, forward, forward + backward) of a strategy, from committed results.

Each of the first functions takes the content of a result file and the name of a strategy's page. It
yields rows of cells as the page shows them. It yields no row if the file does not have the
strategy.
"""

import re
import statistics
from collections import defaultdict

from benchmarks.ranks.same_bits import AS_IT_IS, EIGHT_BITS, WAYS
from benchmarks.recurrent.ranks import RANKS
from benchmarks.simulate.choices import NEAR

PASSES = "forward", "forward+backward"  # the names of passes in results, without spaces
LINK = {"rate_mbit": 100, "ratio": 1.5}  # the measured setting that the page shows
STEP_OF_SILENT = "time of a step, relative to a step that sends nothing"
STEP_OF_RING = "speed of a step, relative to Ring"
TRANSPORTS = {"lasp2": "all_gather", "zeco": "scan"}


def speed(found, strategy):
    """Yield the speed on several ranks, relative to SDPA in one process."""
    ranks, ratios = found["shape"]["ranks"], found["ratio_to_sdpa"]
    for dtype in dict.fromkeys(key.split("/")[0] for key in ratios):
        keys = [f"{dtype}/{way}/{strategy}" for way in PASSES]
        if keys[0] in ratios:
            shown = [f"{ratios[key]:.2f}" for key in keys]
            yield "speed, relative to SDPA in one process", f"{ranks} ranks, {dtype}", *shown


def communication(found, strategy):
    """Yield the time of Ring's communication, and for other strategies the speed relative to it."""
    shown = [row for row in found["rows"] if row.items() >= LINK.items()]
    of_ring = {
        named(row, "topology", "pass"): row["communication"]
        for row in shown
        if row["contender"] == "ring"
    }

    def faster(row):
        return f"{of_ring[named(row, 'topology', 'pass')] / row['communication']:.2f}"

    for rows in by_pass(shown, "topology", "contender"):
        row = either(rows)
        if (option := option_of(strategy, row["contender"])) is not None:
            where = place(row, found["shape"]["ranks"], option)
            if strategy == "ring":
                yield "time of communication", where, *cells(rows, communication_time)
            else:
                yield "speed of communication, relative to Ring", where, *cells(rows, faster)


def gain(found, strategy):
    """Yield the speed of steps, relative to Ring's steps."""
    for rows in by_pass(found["rows"], "topology", "ranks", "ratio", "contender"):
        row = either(rows)
        if (option := option_of(strategy, row["contender"])) is not None and "gain" in row:
            where = place(row, row["ranks"], f"computation {row['ratio']:g}", option)
            yield STEP_OF_RING, where, *cells(rows, lambda x: f"{x['gain']:.2f}")


def host(found, strategy):
    """Yield the host's time in forward and in both passes, and its ratio to a bare loop's time."""
    if transport := TRANSPORTS.get(strategy):
        strategy = f"lasp2 {transport}"
    mine = [row for row in found["rows"] if row["strategy"] == strategy]
    for rows in by_pass(mine, "layout"):
        first, second = (rows[way]["microseconds"] for way in ("forward", "backward"))
        both = {name: first[name] + second[name] for name in ("strategy", "floor")}
        layout = rows["forward"]["layout"]
        yield "host time", layout, *(f"{x['strategy']:,.0f} µs" for x in (first, both))
        over = (f"{x['strategy'] / x['floor']:.1f}" for x in (first, both))
        yield "host time, relative to a bare loop", layout, *over


def same_bits(found, strategy):
    """Yield the time of the option for the same bits, and the time and bytes of 8-bit messages."""
    where = f"{found['shape']['ranks']} ranks, fp32"
    for way, options in WAYS.get(strategy, {}).items():
        ((name, value),) = options.items()
        option = f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        ratio = found["ratios"][f"{strategy}, {way}"]
        yield f"time with `{option}`, relative to the default", where, "", f"{ratio:.2f}"
        if way == EIGHT_BITS:
            check, default = (found["checks"][f"{strategy}, {each}"] for each in (way, AS_IT_IS))
            yield f"bytes sent by a rank with `{option}`", where, "", mebibytes(check)
            yield "bytes sent by a rank by default", where, "", mebibytes(default)


def simulated(found, strategy):
    """Yield the median error of simulated steps."""
    groups = defaultdict(list)
    for row in found["rows"]:
        if row["strategy"] == strategy and row["ranks"] > 1:
            groups[row["where"]].append(row)
    for where, rows in groups.items():
        ranks = " and ".join(map(str, sorted({row["ranks"] for row in rows})))
        error = statistics.median(abs(row["error"]) for row in rows)
        yield "median error of simulated steps", f"{ranks} ranks, {where}", "", f"{error:.1%}"


def relative_to_all(found, strategy):
    """Yield how often a strategy is near the fastest strategy, and its median relative time."""
    groups = defaultdict(list)
    for row, result in zip(found["rows"], found["results"], strict=True):
        seconds = result["measured"]
        on = "links" if row["setting"]["rate_mbit"] else "cores"
        for name in seconds:
            if (option := option_of(strategy, name)) is not None:
                where = ", ".join(filter(None, (on, option)))
                groups[where].append(seconds[name] / seconds[result["best"]])
    for where, over in groups.items():
        near = statistics.mean(x <= 1 + NEAR for x in over)
        of = f"{len(over)} settings, {where}"
        yield f"settings within {NEAR:.0%} of the fastest strategy", of, "", f"{near:.0%}"
        time = f"{statistics.median(over):.2f}"
        yield "median time, relative to the fastest strategy", of, "", time


def tasks(found, strategy):
    """Yield the speed of steps with planned tasks, relative to zigzag Ring."""
    for row in found["rows"]:
        if (option := option_of(strategy, row["contender"])) is not None:
            where = place(row | {"topology": found["topology"]}, row["ranks"], option)
            yield "speed of a step, relative to zigzag Ring", where, "", f"{row['speed']:.2f}"


def linear(found, strategy):
    """Yield the time of steps of linear attention, relative to silent steps and to Ring.

    A silent step sends nothing.
    """
    key = "topology", "ranks", "tokens", "pass"
    slept = [row for row in found["rows"] if row["computes"] == "sleeps" and row["ranks"] > 2]
    of_ring = {named(row, *key): row["total"] for row in slept if row["contender"] == "Ring"}

    def faster(row):
        return f"{of_ring[named(row, *key)] / row['total']:.1f}"

    def longer(row):
        return f"{row['total'] / row['without_communication']:.2f}"

    for rows in by_pass(slept, *key[:3], "contender"):
        row = either(rows)
        if row["contender"] == f"LASP-2 {TRANSPORTS[strategy]}":
            where = place(row, row["ranks"], f"{row['tokens']:,} tokens per rank")
            yield STEP_OF_SILENT, where, *cells(rows, longer)
            yield STEP_OF_RING, where, *cells(rows, faster)


def kernels(found, _):
    """Yield the time of the recurrence token by token, relative to seqpar."""
    for rows in by_pass([x | {"pass": PASSES[x["backward"]]} for x in found["rows"]], "kind"):
        row = either(rows)
        shape = f"{row['tokens']:,} tokens, {row['heads']} heads, D = {row['dim']}"
        for peer in row["times ours"]:
            shown = cells(rows, lambda x, peer=peer: number(x["times ours"][peer]))
            what = f"time token by token ({peer}), relative to seqpar"
            yield what, f"one core, {row['kind']}, {shape}", *shown


def kinds(found, _):
    """Yield the speed on several ranks, relative to one process."""
    for rows in by_pass(found["rows"], "kind", "transport"):
        where = f"{RANKS} ranks, {', '.join(named(either(rows), 'kind', 'transport'))}"
        yield "speed, relative to one process", where, *cells(rows, lambda x: f"{x['speed']:.2f}")


def maps(found, _):
    """Yield the times of steps that send maps on a link."""
    found = [row | {"tokens": row["shape"][0]} for row in found["rows"]]
    for rows in by_pass(found, "tokens", "transport"):
        row = either(rows) | {"topology": "mesh"}
        where = place(row, RANKS, f"{row['tokens']:,} tokens", row["transport"])
        yield STEP_OF_SILENT, where, *cells(rows, lambda x: f"{x['ratio']:.2f}")
        yield "bytes sent by a rank", where, *cells(rows, mebibytes)


def by_pass(rows, *names):
    """Return a list of {pass: row}, with one dict for rows that differ only in their pass."""
    groups = defaultdict(dict)
    for row in rows:
        groups[named(row, *names)][row["pass"].replace(" ", "")] = row
    return list(groups.values())


def either(rows):
    """Return the row of any pass, to read values that all passes share."""
    return next(iter(rows.values()))


def named(row, *names):
    return tuple(row[name] for name in names)


def cells(rows, shown):
    """Return the cell of forward, and the cell of forward with backward."""
    return [shown(rows[way]) if way in rows else "" for way in PASSES]


def option_of(strategy, contender):
    """Return the options in a contender's name, or None if the contender is another strategy."""
    match = re.fullmatch(rf"{strategy}\b,? ?(.*)", contender)
    return None if match is None else match[1]


def place(row, ranks, *more):
    """Return the ranks and links of a row's measurement, and `more`, as text."""
    links = {"mesh": "per pair", "switch": "per rank"}[row["topology"]]
    return ", ".join(filter(None, (f"{ranks} ranks", f"{row['rate_mbit']} Mbit/s {links}", *more)))


def communication_time(row):
    return milliseconds(row["communication"])


def milliseconds(seconds):
    return f"{seconds * 1e3:,.0f} ms"


def mebibytes(row):
    """Return a row's bytes in MiB, as text."""
    return f"{row['bytes'] / 2**20:.1f} MiB"


def number(x):
    """Return a number as text, with at least three digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
