"""Write the tables of docs/benchmarks/strategies.md from the committed results.

Run `python -m tests.tools.measured` when a file of benchmarks/results has changed. It replaces the
text between the comments of the page. The remarks above each table are written by hand. A test
compares the page with what this program would write.
"""

import functools
import json
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import RESULTS
from tests.support.pages import ROOT
from tests.tools import figures

PAGE = ROOT / "docs/benchmarks/strategies.md"
# The generated text of one section: `name` is a strategy, or "settings".
GENERATED = re.compile(
    r"<!-- written from results: (?P<name>\w+) -->\n.*?<!-- end -->\n", re.DOTALL
)
HEAD = "what", "where", "forward", "forward + backward", "result"
SETTINGS_HEAD = "result", "machine", "date", "setting"
LINKS = "emulated links, one per pair of ranks or one per rank"
SHAPE = "{heads} heads, D = {head_dim}"


class Source(NamedTuple):
    """A kind of result.

    Attributes:
        name: the name of its file, without the suffix.
        figures: a function of (file content, strategy) that yields the strategy's rows.
        subject: the quantity it measures, for the line about missing measurements.
        page: the page that explains it, under docs.
        setting: the setting that all rows share; names in braces are values of the file.
        changed: (ISO time, reason): results before that time would differ today.
    """

    name: str
    figures: Callable
    subject: str
    page: str
    setting: str
    changed: tuple = ()


SPEED = Source(
    "strategies",
    figures.speed,
    "speed relative to SDPA",
    "ranks.md",
    f"{{tokens:,}} tokens, {SHAPE}, causal. Ranks have one thread; SDPA has one per rank.",
)
LINK = Source(
    "network-softmax",
    figures.communication,
    "communication on links",
    "network.md",
    f"{LINKS}; {{tokens_per_rank:,}} tokens per rank, {SHAPE}, {{dtype}}, no mask. The table of "
    "the linked page also has exposed shares and bytes.",
    ("2026-11-22T06:33", "Ring and AllGather send keys with values, and hide more in backward"),
)
GAIN = Source(
    "network-mesh",
    figures.gain,
    "steps on a mesh of links",
    "network.md",
    f'{LINKS}; {{tokens_per_rank:,}} tokens per rank, {SHAPE}, {{dtype}}, no mask. "Computation '
    '0.5" means that one step of Ring computes half as long as its keys and values travel.',
)
HOST = Source(
    "overhead",
    figures.host,
    "host time",
    "ranks.md",
    "CPU time on one rank of 8, for the strategy's part of a call. The bare loop posts the same "
    "messages and makes the same copies and launches.",
)
BITS = Source(
    "same-bits",
    figures.same_bits,
    'the cost of messages in 8 bits, and of deterministic="ranks"',
    "../internals/numerics.md",
    f"{{tokens:,}} tokens, {SHAPE}, causal, ranks with one thread. The linked page has the errors "
    "of messages in 8 bits.",
)
SIMULATED = Source(
    "simulate",
    figures.simulated,
    "the error of simulated steps",
    "simulate.md",
    "steps of several lengths and layouts, on cores of one machine and on emulated links.",
)
CHOICES = Source(
    "choices",
    figures.relative_to_all,
    "steps relative to the fastest strategy",
    "simulate.md",
    "random lengths, heads, windows and layouts, on cores or on emulated links, fp32.",
)
TASKS = Source(
    "network-disaggregated",
    figures.tasks,
    "steps whose tasks are planned",
    "disaggregated.md",
    f"{LINKS}; {{tokens:,}} tokens in documents of up to {{context:,}}, {SHAPE}, {{kv_heads}} "
    "KV heads, {dtype}. Documents are in order, unless the row says otherwise: in a zigzag layout, "
    'or placed by `balance.place_homes` ("homes placed").',
)
LINEAR = Source(
    "network-linear",
    figures.linear,
    "steps on links",
    "papers.md",
    f"{LINKS}; {SHAPE}, {{dtype}}, medians of {{rounds}} rounds. Sleeps replace computation. Ring "
    "sends keys and values, and computes the same result.",
)
KERNELS = Source(
    "recurrent-kernels",
    figures.kernels,
    "speed on one core",
    "recurrent.md",
    "fp32, one thread. Autograd differentiates the recurrence token by token.",
)
KINDS = Source(
    "recurrent-ranks",
    figures.kinds,
    "speed of ranks relative to one process",
    "recurrent.md",
    "ranks with one thread, and one process with one thread per rank.",
)
MAPS = Source(
    "recurrent-links",
    figures.maps,
    "steps on links",
    "recurrent.md",
    "each rank on its own host, joined by an emulated link; {kind}.",
)
SOURCES = {
    "ring": (SPEED, CHOICES, LINK, HOST, BITS, SIMULATED),
    "all_gather": (SPEED, CHOICES, LINK, GAIN, HOST, BITS, SIMULATED),
    "ulysses": (SPEED, CHOICES, LINK, GAIN, HOST, BITS, SIMULATED),
    "usp": (SPEED, CHOICES, LINK, HOST, BITS, SIMULATED),
    "mesh": (SPEED, CHOICES, GAIN, HOST, BITS, SIMULATED),
    "token_ring": (SPEED, CHOICES, LINK, GAIN, HOST, BITS, SIMULATED),
    "disaggregated": (CHOICES, TASKS, SPEED, HOST, SIMULATED),
    "lasp2": (LINEAR, HOST),
    "zeco": (LINEAR, HOST),
    "recurrent": (KERNELS, KINDS, MAPS, HOST),
}


def tables(strategy, results=RESULTS):
    """Return the table of a strategy, and a line that names what has not been measured."""
    rows, missing = [], []
    for source in SOURCES[strategy]:
        files = measured_files(source, results)
        shown = [
            (*row, source.name if len(files) == 1 else f"{source.name}, {path.parent.name}")
            for path in files
            for row in source.figures(load(path), strategy)
        ]
        rows += shown
        if not shown:
            missing.append(source.subject)
    parts = [table(HEAD, rows)] if rows else []
    if missing:
        line = f"The following has not been measured: {'; '.join(missing)}."
        parts.append(textwrap.fill(line, 100))
    return "\n\n".join(parts) + "\n"


def settings(results=RESULTS):
    """Return a table that explains the results by machine, date and setting."""
    sources = dict.fromkeys(source for sources in SOURCES.values() for source in sources)
    return (
        table(
            SETTINGS_HEAD,
            [
                setting_row(source, load(path))
                for source in sources
                for path in measured_files(source, results)
            ],
        )
        + "\n"
    )


def setting_row(source, content):
    """Return the row of `settings` for one result file."""
    environment = content["environment"]
    values = content | content.get("shape", {}) | content.get("setting", {})
    setting = source.setting.format(**values)
    if source.changed and environment["date"] < source.changed[0]:
        setting += f" The code has changed since: {source.changed[1]}."
    machine = "{device}, {cores} cores, torch {versions[torch]}".format(**environment)
    date = environment["date"].partition("T")[0]
    return f"[{source.name}]({source.page})", machine, date, setting


def table(head, rows):
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def measured_files(source, results):
    """Return the paths of a source's results, one for each machine that measured it."""
    return sorted(results.glob(f"*/{source.name}.json"))


@functools.cache
def load(path):
    """Return the content of a result file."""
    return json.loads(path.read_text())


def written():
    """Return the page with its tables written from the results."""

    def section(match):
        name = match["name"]
        text = settings() if name == "settings" else tables(name)
        return f"<!-- written from results: {name} -->\n\n{text}\n<!-- end -->\n"

    return GENERATED.sub(section, PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(written())
