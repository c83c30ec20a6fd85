"""Rows (what, where, forward, forward + backward) of a strategy, from committed results.

Each of the first functions takes the content of a result file and the name of a strategy's page. It
yields rows with the cells that the page shows, and no row if the file does not have the strategy.
"""

import re
import statistics
from collections import defaultdict

from benchmarks.ranks.same_bits import AS_IT_IS, EIGHT_BITS, PARTS, WAYS
from benchmarks.recurrent.ranks import RANKS
from benchmarks.simulate.choices import NEAR

PASSES = "forward", "forward+backward"  # as results name them, without spaces
LINK = {"rate_mbit": 100, "ratio": 1.5}  # the measured setting that the page shows
TRANSPORTS = {"lasp2": "all_gather", "zeco": "scan"}


def speed(found, strategy):
    """Yield the speed of ranks relative to SDPA."""
    ranks, ratios = found["shape"]["ranks"], found["ratio_to_sdpa"]
    for dtype in dict.fromkeys(key.split("/")[0] for key in ratios):
        keys = [f"{dtype}/{way}/{strategy}" for way in PASSES]
        if keys[0] in ratios:
            shown = [f"{ratios[key]:.2f}" for key in keys]
            yield "speed, SDPA in one process = 1", f"{ranks} ranks, {dtype}", *shown


def communication(found, strategy):
    """Yield the time of communication, its exposed share, and its speed relative to Ring's."""
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
            yield "communication, exposed, sent", where, *cells(rows, exposed)
            if strategy != "ring":
                yield "speed of communication, Ring = 1", where, *cells(rows, faster)


def gain(found, strategy):
    """Yield the speed of steps relative to Ring's."""
    for rows in by_pass(found["rows"], "topology", "ranks", "ratio", "contender"):
        row = either(rows)
        if (option := option_of(strategy, row["contender"])) is not None and "gain" in row:
            where = place(row, row["ranks"], f"compute {row['ratio']:g}", option)
            yield "speed, Ring = 1", where, *cells(rows, lambda x: f"{x['gain']:.2f}")


def host(found, strategy):
    """Yield the host's time in forward and in both passes, and its ratio to a bare loop's."""
    if transport := TRANSPORTS.get(strategy):
        strategy = f"lasp2 {transport}"
    mine = [row for row in found["rows"] if row["strategy"] == strategy]
    for rows in by_pass(mine, "layout"):
        first, second = (rows[way]["microseconds"] for way in ("forward", "backward"))
        both = {name: first[name] + second[name] for name in ("strategy", "floor")}
        shown = [(x["strategy"], x["strategy"] / x["floor"]) for x in (first, both)]
        times = [f"{microseconds:,.0f} µs, {over:.1f}" for microseconds, over in shown]
        yield "host's time, and its ratio to a bare loop's", rows["forward"]["layout"], *times


def same_bits(found, strategy):
    """Yield the time of the same bits, and the time, bytes and errors of messages in 8 bits."""
    where = f"{found['shape']['ranks']} ranks, fp32"
    for way, options in WAYS.get(strategy, {}).items():
        ((name, value),) = options.items()
        option = f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        ratio = found["ratios"][f"{strategy}, {way}"]
        yield f"time with `{option}`, without = 1", where, "", f"{ratio:.2f}"
        if way == EIGHT_BITS:
            checks = [found["checks"][f"{strategy}, {each}"] for each in (way, AS_IT_IS)]
            yield "sent with it, and without", where, "", ", ".join(map(mebibytes, checks))
            errors = {x: f"{x} {checks[0]['errors'][x]:.1e}".replace("e-0", "e-") for x in PARTS}
            yield "RMS error with it", where, errors.pop("out"), ", ".join(errors.values())


def simulated(found, strategy):
    """Yield the error of simulated steps."""
    groups = defaultdict(list)
    for row in found["rows"]:
        if row["strategy"] == strategy and row["ranks"] > 1:
            groups[row["where"]].append(row)
    for where, rows in groups.items():
        ranks = " and ".join(map(str, sorted({row["ranks"] for row in rows})))
        error = statistics.median(abs(row["error"]) for row in rows)
        yield "error of simulated steps, median", f"{ranks} ranks, {where}", "", f"{error:.1%}"


def relative_to_all(found, strategy):
    """Yield the share of settings with a strategy near the fastest, and its relative time."""
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
        shown = f"{near:.0%} of {len(over)} settings, {statistics.median(over):.2f}"
        what = f"within {NEAR:.0%} of the fastest, time (the fastest = 1)"
        yield what, where, "", shown


def tasks(found, strategy):
    """Yield the times of steps with planned tasks."""
    for row in found["rows"]:
        if (option := option_of(strategy, row["contender"])) is not None:
            where = place(row | {"topology": found["topology"]}, row["ranks"], option)
            shown = milliseconds(row["seconds"]), f"{row['speed']:.2f}", f"{row['fraction']:.0%}"
            what = "a step, speed (zigzag Ring = 1), exposed, sent"
            yield what, where, "", ", ".join((*shown, mebibytes(row)))


def planning(found, _):
    """Yield the time of planning, and the balance of the plan."""
    for name, row in found["planning"].items():
        where = f"{row['documents']:,} documents, lengths of {name}"
        shown = f"{milliseconds(row['seconds'])}, {row['max_over_mean']:.2f}"
        yield "planning, max/mean of the work", where, shown, ""


def servers(found, _):
    """Yield servers' share of their transport's bandwidth, and their added time in a short task."""
    for row in found["targets"]:
        if re.match(r"\w+: (bandwidth|added)", row["what"]):
            yield row["what"], "a server of the same machine", number(row["found"]), ""


def linear(found, strategy):
    """Yield the times of steps of linear attention."""
    key = "topology", "ranks", "tokens", "pass"
    slept = [row for row in found["rows"] if row["computes"] == "sleeps" and row["ranks"] > 2]
    of_ring = {named(row, *key): row["total"] for row in slept if row["contender"] == "Ring"}

    def shown(row):
        over = row["total"] / row["without_communication"], of_ring[named(row, *key)] / row["total"]
        return f"{milliseconds(row['total'])}, {over[0]:.2f}, {over[1]:.1f}"

    for rows in by_pass(slept, *key[:3], "contender"):
        row = either(rows)
        if row["contender"] == f"LASP-2 {TRANSPORTS[strategy]}":
            where = place(row, row["ranks"], f"{row['tokens']:,} tokens per rank")
            what = "a step, over one with nothing sent, speed (Ring = 1)"
            yield what, where, *cells(rows, shown)


def kernels(found, _):
    """Yield the time of the recurrence token by token."""
    for rows in by_pass([x | {"pass": PASSES[x["backward"]]} for x in found["rows"]], "kind"):
        row = either(rows)
        shape = f"{row['tokens']:,} tokens, {row['heads']} heads, D = {row['dim']}"
        for peer in row["times ours"]:
            shown = cells(rows, lambda x, peer=peer: number(x["times ours"][peer]))
            what = f"time token by token ({peer}), ours = 1"
            yield what, f"a core, {row['kind']}, {shape}", *shown


def kinds(found, _):
    """Yield the speed of ranks relative to one process."""
    for rows in by_pass(found["rows"], "kind", "transport"):
        where = f"{RANKS} ranks, {', '.join(named(either(rows), 'kind', 'transport'))}"
        yield "speed, one process = 1", where, *cells(rows, lambda x: f"{x['speed']:.2f}")


def maps(found, _):
    """Yield the times of steps whose maps travel on a link."""

    def shown(row):
        return f"{milliseconds(row['total'])}, {row['ratio']:.2f}, {mebibytes(row)}"

    found = [row | {"tokens": row["shape"][0]} for row in found["rows"]]
    for rows in by_pass(found, "tokens", "transport"):
        row = either(rows) | {"topology": "mesh"}
        where = place(row, RANKS, f"{row['tokens']:,} tokens", row["transport"])
        yield "a step, over one with nothing sent, bytes", where, *cells(rows, shown)


def by_pass(rows, *names):
    """Return rows as [{pass: row}], one dict for rows that differ only in their pass."""
    groups = defaultdict(dict)
    for row in rows:
        groups[named(row, *names)][row["pass"].replace(" ", "")] = row
    return list(groups.values())


def either(rows):
    """Return the row of any pass, for values that all passes share."""
    return next(iter(rows.values()))


def named(row, *names):
    """Return some values of a row."""
    return tuple(row[name] for name in names)


def cells(rows, shown):
    """Return the cells of forward, and of forward with backward."""
    return [shown(rows[way]) if way in rows else "" for way in PASSES]


def option_of(strategy, contender):
    """Return the options in a contender's name, or None if it is another strategy's."""
    match = re.fullmatch(rf"{strategy}\b,? ?(.*)", contender)
    return None if match is None else match[1]


def place(row, ranks, *more):
    """Return the ranks and links of a row's measurement, and `more`."""
    links = {"mesh": "per pair", "switch": "per rank"}[row["topology"]]
    return ", ".join(filter(None, (f"{ranks} ranks", f"{row['rate_mbit']} Mbit/s {links}", *more)))


def exposed(row):
    """Return the time of communication, the share that is exposed, and the bytes of a rank."""
    share = f"{max(row['fraction'], 0):.0%}"  # measured shares may be negative
    return f"{milliseconds(row['communication'])}, {share}, {mebibytes(row)}"


def milliseconds(seconds):
    """Return seconds as milliseconds."""
    return f"{seconds * 1e3:,.0f} ms"


def mebibytes(row):
    """Return the bytes of a row as MiB."""
    return f"{row['bytes'] / 2**20:.1f} MiB"


def number(x):
    """Return a figure with three digits or more."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
