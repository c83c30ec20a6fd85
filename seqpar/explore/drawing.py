"""Draw an answer as SVG, in the colours of the page."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import pairwise

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.layout.layout import Layout
from seqpar.layout.plot import COLOURS, held_fractions
from seqpar.simulate.playback.outcome import Outcome

MAX_NUMBERED_CELLS = 1024  # larger tables have only colours
WIDTH, LEFT = 760, 62


def svg(height: float, body: str, label: str, width: float = WIDTH) -> str:
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"'
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
    step, lane = (WIDTH - LEFT) / columns, 18.0
    body = ""
    for rank, row in enumerate(held):
        body += text(LEFT - 8, lane * rank + 12, f"rank {rank}", 'class="end"')
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
    body = ""
    for column in range(count) if count <= 24 else ():
        body += text(LEFT + (column + 0.5) * width, 12, columns[column], 'class="middle dim"')
    for rank in range(ranks):
        y = 18 + rank * height
        body += text(LEFT - 8, y + 16, f"rank {rank}", 'class="end"')
        for column in range(count):
            value = int(values[rank, column])
            fill = f'fill="{colour(rank)}" fill-opacity="{0.05 + 0.6 * value / most:.2f}"'
            x, title = LEFT + column * width, f"rank {rank}, {columns[column]}: {value:,}"
            body += rectangle(x + 1, y + 1, width - 2, height - 2, fill, title)
            if values.size <= MAX_NUMBERED_CELLS and width > 44 and value:
                body += text(x + width / 2, y + 16, shown(value), 'class="middle"')
    return svg(18 + ranks * height, body, label)


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
