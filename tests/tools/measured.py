"""Write what was measured of each strategy at the end of its page, from the committed results.

`python -m tests.tools.measured` replaces what follows a comment in docs/strategies/*.md. Run it
when a file of benchmarks/results has changed: a test holds the pages to what it would write.
"""

import functools
import json
import textwrap
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import RESULTS
from tests.support.pages import ROOT
from tests.tools import figures

MARK = "<!-- What follows is written by tests.tools.measured. -->"
HEAD = "what", "where", "forward", "forward + backward", "result"
LINKS = "emulated links of a known rate, one for each pair of ranks or one a rank"
SHAPE = "{heads} heads, D = {head_dim}"


class Source(NamedTuple):
    """A kind of result.

    Attributes:
        name: of its file.
        figures: yields a strategy's rows.
        subject: what it measures, to say that it has not been.
        page: explains it, under docs.
        setting: what all rows share, of the file's values that are in braces.
        changed: since when results would be others, if some are older, and why.
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
    "speed beside SDPA",
    "benchmarks/ranks.md",
    f"{{tokens:,}} tokens, {SHAPE}, causal; ranks of one thread, and SDPA with as many threads.",
)
LINK = Source(
    "network-softmax",
    figures.communication,
    "communication beside Ring's",
    "benchmarks/network.md",
    f"{LINKS}; {{tokens_per_rank:,}} tokens a rank, {SHAPE}, {{dtype}}, no mask. Communication "
    "alone; the share of it that a step does not hide in which compute takes "
    f"{figures.LINK['ratio']:g} times as long as a transfer of Ring's; and what a rank sends.",
    ("2026-11-22T06:33", "Ring and AllGather send keys with values and hide more of backward"),
)
GAIN = Source(
    "network-mesh",
    figures.gain,
    "steps beside Ring's on a mesh of ranks",
    "benchmarks/network.md",
    f"{LINKS}; {{tokens_per_rank:,}} tokens a rank, {SHAPE}, {{dtype}}, no mask. Compute is in "
    "units of a transfer of Ring's.",
)
HOST = Source(
    "overhead",
    figures.host,
    "the host's time",
    "benchmarks/ranks.md",
    "what the host of one of many ranks needs for the strategy's part of a call, beside a bare "
    "loop of its messages, copies and launches.",
)
BITS = Source(
    "same-bits",
    figures.same_bits,
    "messages in 8 bits, and the same bits on any number of ranks",
    "internals/numerics.md",
    f"{{tokens:,}} tokens, {SHAPE}, causal, ranks of one thread. Errors are over the result's RMS.",
)
SIMULATED = Source(
    "simulate",
    figures.simulated,
    "the error of simulated steps",
    "benchmarks/simulate.md",
    "steps of several lengths and layouts, on cores of one machine and on emulated links.",
)
CHOICES = Source(
    "choices",
    figures.beside_all,
    "steps beside all others",
    "benchmarks/simulate.md",
    "settings are random lengths, heads, windows and layouts, on ranks of one thread or on "
    "emulated links, fp32. Times are medians over settings.",
)
TASKS = Source(
    "network-disaggregated",
    figures.tasks,
    "steps whose tasks are planned",
    "benchmarks/disaggregated.md",
    f"{LINKS}; {{tokens:,}} tokens in documents of up to {{context:,}}, {SHAPE}, {{kv_heads}} of "
    "keys, {dtype}. Documents are in order but where the row says otherwise.",
)
PLANNING = Source(
    "disaggregated-plans",
    figures.planning,
    "planning",
    "benchmarks/disaggregated.md",
    "one core plans a batch for a cluster of many servers.",
)
SERVERS = Source(
    "servers",
    figures.servers,
    "attention servers",
    "benchmarks/servers.md",
    f"{SHAPE}, {{kv_heads}} of keys, {{dtype}}.",
)
LINEAR = Source(
    "network-linear",
    figures.linear,
    "steps on links",
    "benchmarks/papers.md",
    f"{LINKS}; {SHAPE}, {{dtype}}, medians of {{rounds}} rounds in which computes sleep. Ring "
    "moves keys and values for the same product.",
)
KERNELS = Source(
    "recurrent-kernels",
    figures.kernels,
    "speed on one core",
    "benchmarks/recurrent.md",
    "both are differentiated by autograd; fp32, one thread.",
)
KINDS = Source(
    "recurrent-ranks",
    figures.kinds,
    "speed of ranks beside one process",
    "benchmarks/recurrent.md",
    "ranks of one thread, and one process with as many threads.",
)
MAPS = Source(
    "recurrent-links",
    figures.maps,
    "steps on links",
    "benchmarks/recurrent.md",
    "a host for each rank, joined by an emulated link of a known rate; {kind}.",
)
SOURCES = {
    "ring": (SPEED, CHOICES, LINK, HOST, BITS, SIMULATED),
    "all_gather": (SPEED, CHOICES, LINK, GAIN, HOST, BITS, SIMULATED),
    "ulysses": (SPEED, CHOICES, LINK, GAIN, HOST, BITS, SIMULATED),
    "usp": (SPEED, CHOICES, LINK, HOST, BITS, SIMULATED),
    "mesh": (SPEED, CHOICES, GAIN, HOST, BITS, SIMULATED),
    "token_ring": (SPEED, CHOICES, LINK, GAIN, HOST, BITS, SIMULATED),
    "disaggregated": (CHOICES, TASKS, PLANNING, SERVERS, SPEED, HOST, SIMULATED),
    "lasp2": (LINEAR, HOST),
    "zeco": (LINEAR, HOST),
    "recurrent": (KERNELS, KINDS, MAPS, HOST),
}


def page(strategy):
    """Return the path of a strategy's page."""
    return ROOT / f"docs/strategies/{strategy}.md"


def section(strategy, results=RESULTS):
    """Return what a page says of the results in the folders of a folder: a table for each."""
    machines, missing = defaultdict(list), []
    for source in SOURCES[strategy]:
        files = [(x.parent.name, load(x)) for x in sorted(results.glob(f"*/{source.name}.json"))]
        known = [(name, found, list(source.figures(found, strategy))) for name, found in files]
        known = [(name, found, rows) for name, found, rows in known if rows]
        if not known:
            missing.append(source.subject)
        for name, found, rows in known:
            machines[name].append((source, found, rows))
    parts = [part for name, parts in machines.items() for part in of_machine(name, parts)]
    if missing:
        parts.append(f"Not measured: {'; '.join(missing)}.")
    return "\n\n".join(map(wrapped, parts)) + "\n"


def of_machine(name, parts):
    """Yield the paragraphs of a folder: what machine it was, its table, and a list of settings."""
    environments = [found["environment"] for _, found, _ in parts]
    cores = max(at["cores"] for at in environments)
    torch = ", ".join(sorted({at["versions"]["torch"] for at in environments}))
    device = environments[0]["device"]
    yield f"{device}, {cores} cores, torch {torch}; files of `benchmarks/results/{name}`:"
    rows = [(*row, source.name) for source, _, rows in parts for row in rows]
    yield "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows))
    yield "\n".join(item(source, found["environment"], found) for source, found, _ in parts)


def item(source, environment, found):
    """Return when and in what setting a result was measured, and where it is explained."""
    values = found | found.get("shape", {}) | found.get("setting", {})
    when = environment["date"].partition("T")[0]
    text = f"* [{source.name}](../{source.page}), {when}: {source.setting.format(**values)}"
    if source.changed and environment["date"] < source.changed[0]:
        text += f" Since then {source.changed[1]}."
    return wrapped(text, subsequent_indent="  ")


def wrapped(text, **options):
    """Return a paragraph in lines of at most 100 characters; tables and lists as they are."""
    if text.startswith("|") or "\n" in text:
        return text
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False, **options)


@functools.cache
def load(path):
    """Return the content of a result file."""
    return json.loads(path.read_text())


def written(strategy):
    """Return a page's text with what was measured."""
    by_hand, mark, _ = page(strategy).read_text().partition(MARK)
    if not mark:
        raise SystemExit(f"{page(strategy)} lacks {MARK}")
    return f"{by_hand}{MARK}\n\n{section(strategy)}"


if __name__ == "__main__":
    for strategy in SOURCES:
        page(strategy).write_text(written(strategy))
