"""The page that shows an answer: one file with drawings as SVG, which loads no other files."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import fields
from html import escape
from itertools import pairwise

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.options import dtype_name
from seqpar.explore.question import CHOICES, Answer, Question
from seqpar.layout.layout import Layout
from seqpar.layout.plot import COLOURS, held_fractions
from seqpar.simulate.playback.outcome import Outcome

MAX_NUMBERED_CELLS = 1024  # larger tables show only colours
WIDTH, LEFT = 760, 96
STYLE = """
:root { color-scheme: light dark; --ink: #1f2530; --dim: #667; --paper: #fff; --card: #f5f6f8;
  --lane: #e9ebef; --flight: #c2354f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --dim: #9aa3b2; --paper: #14181f;
  --card: #1d232d; --lane: #2a313d; --flight: #ff9aa8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.2rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .8rem; } h2 { font-size: 1rem; margin: 0 0 .2rem; }
p { margin: 0 0 .7rem; color: var(--dim); font-size: .86rem; }
section, form { background: var(--card); border-radius: .6rem; padding: 1rem; margin: 0 0 1rem; }
form { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .6rem; }
label { font-size: .78rem; color: var(--dim); } label.wide { grid-column: span 2; }
input, select, button { width: 100%; font: inherit; padding: .3rem .45rem; border-radius: .35rem;
  border: 1px solid var(--lane); background: var(--paper); color: var(--ink); }
button { background: #2a5db0; color: #fff; border: 0; align-self: end; cursor: pointer; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem;
  margin: 0 0 1rem; } dt { color: var(--dim); font-size: .78rem; }
dd { margin: 0; font-size: 1.2rem; } .error { border-left: 4px solid var(--flight); }
svg { width: 100%; display: block; }
svg text { font-size: 11.5px; fill: var(--ink); } svg .dim { fill: var(--dim); }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.lane { fill: var(--lane); } .ink { fill: var(--ink); } .flight { fill: var(--flight); }
.cell { stroke: var(--card); stroke-width: .6; } code { overflow-wrap: anywhere; }
@media (max-width: 39rem) { /* A picture is drawn smaller there, so its words are larger in it. */
  svg text { font-size: 20px; } svg text.number { font-size: 18px; } svg .tight { display: none; } }
"""


def page(
    result: Answer | None, texts: dict[str, str], error: str = "", served: bool = False
) -> str:
    """Return the page that shows an answer or an error. If `served`, it has a form with the
    `texts`.
    """
    parts = [form(texts)] if served else []
    if error:
        parts.append(f'<section class="error"><h2>Refused</h2>{escape(error)}</section>')
    title = "seqpar explore"
    if result is not None:
        parts += [figures(result), *pictures(result), again(result.question)]
        title = f"{result.question.candidate()} on {result.question.ranks} ranks"
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{escape(title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>{''.join(parts)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def form(texts: dict[str, str]) -> str:
    inputs = ""
    for field in fields(Question):
        name, value = field.name, texts.get(field.name, str(field.default))
        if name in CHOICES:
            chosen = dtype_name(value)
            options = "".join(
                f"<option{' selected' if x == chosen else ''}>{x}</option>" for x in CHOICES[name]
            )
            entry = f'<select name="{name}">{options}</select>'
        else:
            entry = f'<input name="{name}" value="{escape(value)}">'
        wide = ' class="wide"' if name == "lengths" else ""
        inputs += f"<label{wide}>{name.replace('_', ' ')}{entry}</label>"
    return f'<form method="get" action="/">{inputs}<button>Draw</button></form>'


def figures(result: Answer) -> str:
    outcome, work = result.outcome, result.work.sum(1)
    busiest = work.max() / max(work.mean(), 1)
    waiting = (outcome.waiting / outcome.seconds).mean() if outcome.seconds else 0.0
    rows = {
        "predicted, forward + backward": milliseconds(outcome.seconds),
        "limited by": outcome.limit,
        "share of time spent waiting": f"{waiting:.1%}",
        "sent by the rank that sends most": size(int(result.bytes.sum(1).max())),
        "work of the busiest rank / mean": f"{busiest:.2f}",
        "peak memory of a rank's new tensors": size(int(outcome.peak_bytes.max())),
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(x)}</dd></div>" for name, x in rows.items())
    return f"<dl>{cells}</dl>"


def pictures(result: Answer) -> list[str]:
    layout, ranks = result.layout, result.question.ranks
    steps = [f"step {i}" for i in range(result.work.shape[1])]
    work = table(result.work, steps, count, "work of each rank in each step")
    links = table(result.bytes, [f"to {i}" for i in range(ranks)], size, "bytes per link")
    cluster = result.question.on().name
    return [
        section(
            "Layout",
            f"{layout.tokens:,} tokens in {layout.documents} documents, separated by lines.",
            lanes(layout, layout.cu_seqlens),
        ),
        section("Work", "(Query, key) pairs times heads, forward, by rank and step.", work),
        section("Bytes", "Bytes from each rank to each, forward and backward.", links),
        section(
            "Time",
            f"Predicted on {cluster}: forward, then backward (paler). Thin lines are messages, "
            "from their post until the end of the wait for them.",
            timeline(result.outcome),
        ),
    ]


def section(title: str, words: str, picture: str) -> str:
    head = f"<h2>{title}</h2><p>{escape(words)}</p>"
    return f"<section>{head}{picture}</section>"


def again(question: Question) -> str:
    options = ""
    for field in fields(Question):
        value = getattr(question, field.name)
        if value != field.default:
            options += f" --{field.name.replace('_', '-')} {shlex.quote(str(value))}"
    return f"<p>This page: <code>python -m seqpar explore{escape(options)}</code></p>"


def svg(height: float, body: str, label: str) -> str:
    box = f'viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{body}</svg>'


def rectangle(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    size = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}"'
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f"<rect {size} {style}>{inner}</rect>"


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def lanes(layout: Layout, cu_seqlens: Ints) -> str:
    held = held_fractions(layout, 380)
    ranks, columns = held.shape
    step, lane = (WIDTH - LEFT) / columns, 22.0
    body = ""
    for rank, row in enumerate(held):
        body += text(LEFT - 8, lane * rank + 17, f"rank {rank}", 'class="end"')
        body += rectangle(LEFT, lane * rank, WIDTH - LEFT, lane - 2, 'class="lane"')
        edges = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
        for start, stop in pairwise(edges):
            if row[start]:
                fill = f'fill="{colour(rank)}" fill-opacity="{row[start]:.2f}"'
                x, width = LEFT + start * step, (stop - start) * step
                body += rectangle(x, lane * rank, width, lane - 2, fill)
    for border in cu_seqlens[1:-1] if len(cu_seqlens) < 200 else ():
        x = LEFT + (WIDTH - LEFT) * border / cu_seqlens[-1]
        body += rectangle(x - 0.5, 0, 1, lane * ranks, 'class="ink"')
    return svg(lane * ranks, body, "which rank holds which tokens")


def table(values: Ints, columns: list[str], shown: Callable[[int], str], label: str) -> str:
    ranks, count = values.shape
    width = min((WIDTH - LEFT) / max(count, 1), 110.0)
    height, most = 26.0, max(int(values.max(initial=0)), 1)
    tight = " tight" if width < 76 else ""  # numbers would overlap on a narrow page
    body = ""
    for column in range(count) if count <= 24 else ():
        body += text(
            LEFT + (column + 0.5) * width, 15, columns[column], f'class="middle dim number{tight}"'
        )
    for rank in range(ranks):
        y = 20 + rank * height
        body += text(LEFT - 8, y + 16, f"rank {rank}", 'class="end"')
        for column in range(count):
            value = int(values[rank, column])
            fill = f'fill="{colour(rank)}" fill-opacity="{0.05 + 0.6 * value / most:.2f}"'
            x, title = LEFT + column * width, f"rank {rank}, {columns[column]}: {value:,}"
            body += rectangle(x + 1, y + 1, width - 2, height - 2, fill, title)
            if values.size <= MAX_NUMBERED_CELLS and width > 44 and value:
                body += text(x + width / 2, y + 16, shown(value), f'class="middle number{tight}"')
    return svg(20 + ranks * height, body, label)


def timeline(outcome: Outcome) -> str:
    scale, lane = (WIDTH - LEFT) / max(outcome.seconds, 1e-12), 30.0
    ranks = len(outcome.ends)
    body = ""
    for rank in range(ranks):
        y = rank * lane
        body += text(LEFT - 8, y + 16, f"rank {rank}", 'class="end"')
        body += rectangle(LEFT, y, WIDTH - LEFT, lane - 6, 'class="lane"')
    for event in outcome.trace.events:
        y, x = event.rank * lane, LEFT + event.start * scale
        width, took = (event.stop - event.start) * scale, milliseconds(event.stop - event.start)
        if event.kind == "compute" and width > 0:
            style = f'fill="{colour(event.rank)}" class="cell" opacity="'
            style += '1"' if event.what.split(",")[0].endswith("forward") else '0.72"'
            title = f"{event.what}, step {event.step}: {took}"
            body += rectangle(x, y, width, lane - 14, style, title)
        elif event.kind == "flight":
            to = ", ".join(map(str, event.peers))
            title = f"{event.what}, step {event.step}: {size(event.bytes)} to rank {to}, {took}"
            body += rectangle(x, y + lane - 11, width, 3.5, 'class="flight"', title)
    y = ranks * lane
    for part in range(5):
        tick = f"{part / 4 * outcome.seconds * 1e3:.3g} ms"
        anchor = ("", "middle", "middle", "middle", "end")[part]
        body += text(LEFT + (WIDTH - LEFT) * part / 4, y + 12, tick, f'class="{anchor} dim"')
    return svg(y + 18, body, "when each rank computes, sends and waits")


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 10 else f"{seconds:,.1f} s"


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def count(number: float) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"
