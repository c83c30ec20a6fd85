"""The page of an answer: one file, which loads nothing."""

from __future__ import annotations

import shlex
from dataclasses import fields
from html import escape

from seqpar.explore.answer import Answer
from seqpar.explore.drawing import count, lanes, milliseconds, size, table, timeline
from seqpar.explore.question import DTYPES, LAYOUTS, Question
from seqpar.simulate.candidates import STRATEGIES

CHOICES = {"strategy": STRATEGIES, "layout": LAYOUTS, "causal": ("yes", "no"), "dtype": DTYPES}
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
div.wide { overflow-x: auto; } svg { width: 100%; min-width: 34rem; display: block; }
svg text { font-size: 11.5px; fill: var(--ink); } svg .dim { fill: var(--dim); }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.lane { fill: var(--lane); } .ink { fill: var(--ink); } .flight { fill: var(--flight); }
.cell { stroke: var(--card); stroke-width: .6; } code { overflow-wrap: anywhere; }
"""


def page(found: Answer | None, asked: dict[str, str], error: str = "", served: bool = False) -> str:
    """Return the page of an answer, or of an error.

    Args:
        found: the answer; None: there is an error.
        asked: the question's fields as text, as they were asked.
        error: why there is no answer.
        served: whether the page comes from a server, which answers what its form asks.
    """
    parts = [form(asked)] if served else []
    if error:
        parts.append(f'<section class="error"><h2>Refused</h2>{escape(error)}</section>')
    if found is not None:
        parts += [figures(found), *pictures(found), again(found.question)]
    title = "seqpar explore"
    if found is not None:
        title = f"{found.question.candidate()} on {found.question.ranks} ranks"
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{escape(title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>{''.join(parts)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def form(asked: dict[str, str]) -> str:
    """Return the form, filled with what was asked: it leads to the next question's address."""
    inputs = ""
    for field in fields(Question):
        name, value = field.name, asked.get(field.name, str(field.default))
        if name in CHOICES:
            options = "".join(
                f"<option{' selected' if x == value else ''}>{x}</option>" for x in CHOICES[name]
            )
            entry = f'<select name="{name}">{options}</select>'
        else:
            entry = f'<input name="{name}" value="{escape(value)}">'
        wide = ' class="wide"' if name == "lengths" else ""
        inputs += f"<label{wide}>{name.replace('_', ' ')}{entry}</label>"
    return f'<form method="get" action="/">{inputs}<button>Draw</button></form>'


def figures(found: Answer) -> str:
    """Return the figures that one compares strategies by."""
    outcome, work = found.outcome, found.work.sum(1)
    busiest = work.max() / max(work.mean(), 1)
    rows = {
        "predicted, forward + backward": milliseconds(outcome.seconds),
        "limited by": outcome.limit,
        "waiting, of the time": f"{(outcome.waiting / outcome.seconds).mean():.1%}"
        if outcome.seconds
        else "0%",
        "sent by the rank that sends most": size(int(found.bytes.sum(1).max())),
        "work of the busiest rank / mean": f"{busiest:.2f}",
        "most memory made by a rank": size(int(outcome.peak_bytes.max())),
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(x)}</dd></div>" for name, x in rows.items())
    return f"<dl>{cells}</dl>"


def pictures(found: Answer) -> list[str]:
    """Return the pictures, each with what it shows."""
    layout, ranks = found.layout, found.question.ranks
    steps = [f"step {i}" for i in range(found.work.shape[1])]
    work = table(found.work, steps, count, "work of each rank in each step")
    links = table(found.bytes, [f"to {i}" for i in range(ranks)], size, "bytes a link")
    cluster = found.question.on().name
    return [
        section(
            "Layout",
            f"{layout.tokens:,} tokens in {layout.documents} documents, between the lines.",
            lanes(layout, layout.cu_seqlens),
        ),
        section("Work", "(Query, key) pairs times heads, forward, by rank and step.", work),
        section("Bytes", "What each rank sends to each, forward and backward.", links),
        section(
            "Time",
            f"Predicted on {cluster}: forward, then backward (paler). The thin lines are messages "
            "from when they are posted until they have been waited for.",
            timeline(found.outcome),
        ),
    ]


def section(title: str, words: str, picture: str) -> str:
    """Return a picture under its title."""
    head = f"<h2>{title}</h2><p>{escape(words)}</p>"
    return f'<section>{head}<div class="wide">{picture}</div></section>'


def again(question: Question) -> str:
    """Say how to get this page again."""
    options = ""
    for field in fields(Question):
        value = getattr(question, field.name)
        if value != field.default:
            options += f" --{field.name.replace('_', '-')} {shlex.quote(str(value))}"
    return f"<p>This page: <code>python -m seqpar explore{escape(options)}</code></p>"
