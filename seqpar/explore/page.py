"""The page of an answer, as one file that loads nothing else."""

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


def page(
    result: Answer | None, texts: dict[str, str], error: str = "", served: bool = False
) -> str:
    """Return the page of an answer or an error; if `served`, with a form of the `texts`."""
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
            options = "".join(
                f"<option{' selected' if x == value else ''}>{x}</option>" for x in CHOICES[name]
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
    return f'<section>{head}<div class="wide">{picture}</div></section>'


def again(question: Question) -> str:
    options = ""
    for field in fields(Question):
        value = getattr(question, field.name)
        if value != field.default:
            options += f" --{field.name.replace('_', '-')} {shlex.quote(str(value))}"
    return f"<p>This page: <code>python -m seqpar explore{escape(options)}</code></p>"
